"""The folder of a run: its owner, its status and metrics, and files that are never half written.

    .lock, lease.json   who owns the folder (`Lease`)
    status.json         how the run is doing (`RunStatus`)
    metrics.jsonl       one record per line (`MetricsLog`)

`RunRecord` holds the three together, as a run uses them. `layout` names everything else that is in the folder.

Only the main process of a run writes here. Nothing here imports torch.
"""

from __future__ import annotations

from loopwright.run_folder.files import (
    DamagedFileError,
    fsync_folder,
    read_json,
    write_atomically,
    write_json,
)
from loopwright.run_folder.layout import (
    RunFolder,
    check_new_folder,
    create_run,
    find_run,
    note_in_index,
    read_index,
    runs_root,
)
from loopwright.run_folder.lease import Lease, LeaseError, Owner
from loopwright.run_folder.metrics_log import MetricsLog
from loopwright.run_folder.metrics_log import read as read_metrics
from loopwright.run_folder.record import METRICS, RunRecord
from loopwright.run_folder.status import RunStatus
from loopwright.run_folder.status import read as read_status

__all__ = [
    "METRICS",
    "DamagedFileError",
    "Lease",
    "LeaseError",
    "MetricsLog",
    "Owner",
    "RunFolder",
    "RunRecord",
    "RunStatus",
    "check_new_folder",
    "create_run",
    "find_run",
    "fsync_folder",
    "note_in_index",
    "read_index",
    "read_json",
    "read_metrics",
    "read_status",
    "runs_root",
    "write_atomically",
    "write_json",
]
