"""The folder of a run: its owner, its status and metrics, and files that are never half written.

    .lock, lease.json   who owns the folder (`Lease`)
    status.json         how the run is doing (`RunStatus`)
    metrics.jsonl       one record per line (`MetricsLog`)

`RunRecord` holds the three together, as a run uses them. `layout` names everything else that is in the folder.

Only the main process of a run writes here. Nothing here imports torch.
"""

from loopwright.run_folder import files, status
from loopwright.run_folder.files import DamagedFileError, fsync_folder, read_json, write_atomically, write_json
from loopwright.run_folder.layout import RunFolder, find_run, note_in_index, read_index, runs_root
from loopwright.run_folder.lease import Lease, LeaseError, Owner, live_owner
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.run_folder.record import METRICS, RunRecord
from loopwright.run_folder.status import RunStatus

__all__ = ["METRICS", "DamagedFileError", "Lease", "LeaseError", "MetricsLog", "Owner", "RunFolder", "RunRecord"]
__all__ += ["RunStatus", "find_run", "fsync_folder", "live_owner", "note_in_index", "read_index", "read_json"]
__all__ += ["read_metrics", "read_status", "runs_root", "write_atomically", "write_json"]

read_metrics, read_status = files.read_json_lines, status.read
