"""The folder of a run: its owner, its status and metrics, and files that are never half written.

    .lock, lease.json   who owns the folder (`Lease`)
    status.json         how the run is doing (`RunStatus`)
    metrics.jsonl       one record per line (`MetricsLog`)

`RunRecord` holds the three together, as a run uses them. `layout` names everything else that is in the folder.

Only the main process of a run writes here. Nothing here imports torch.
"""

from loopwright.run_folder import files, status
from loopwright.run_folder.files import DamagedFileError as DamagedFileError
from loopwright.run_folder.files import fsync_folder as fsync_folder
from loopwright.run_folder.files import read_json as read_json
from loopwright.run_folder.files import write_atomically as write_atomically
from loopwright.run_folder.files import write_json as write_json
from loopwright.run_folder.layout import RunFolder as RunFolder
from loopwright.run_folder.layout import find_run as find_run
from loopwright.run_folder.layout import note_in_index as note_in_index
from loopwright.run_folder.layout import read_index as read_index
from loopwright.run_folder.layout import runs_root as runs_root
from loopwright.run_folder.lease import Lease as Lease
from loopwright.run_folder.lease import LeaseError as LeaseError
from loopwright.run_folder.lease import Owner as Owner
from loopwright.run_folder.lease import live_owner as live_owner
from loopwright.run_folder.metrics_log import MetricsLog as MetricsLog
from loopwright.run_folder.record import METRICS as METRICS
from loopwright.run_folder.record import RunRecord as RunRecord
from loopwright.run_folder.status import RunStatus as RunStatus

read_metrics, read_status = files.read_json_lines, status.read
