"""List the checkpoints of a folder, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopwright.checkpoint.store import checkpoint_folders, read_manifest, update_of, verify
from loopwright.errors import CheckpointError


@dataclass(frozen=True)
class Finding:
    """One checkpoint: where it is, its update and size if they can be read, and its problem or None."""

    path: Path
    update: int | None
    num_bytes: int
    problem: str | None

    def __str__(self) -> str:
        update = "?" if self.update is None else self.update
        return f"{self.path.name}  update {update}  {self.num_bytes:,} bytes  {self.problem or 'valid'}"


def verify_all(path: str | Path, say: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Check every byte of a checkpoint, or of all in a folder, oldest update first; calls `say(done, total)`."""
    folder = Path(path)
    folders = [one for one in checkpoint_folders(folder) or [folder] if any(one.iterdir())]
    findings = []
    for done, one in enumerate(folders, 1):
        size = sum(file.stat().st_size for file in one.iterdir() if file.is_file())
        update = problem = None
        try:
            update = update_of(read_manifest(one))
            verify(one)
        except CheckpointError as error:
            problem = str(error)
        findings.append(Finding(one, update, size, problem))
        if say is not None:
            say(done, len(folders))
    return sorted(findings, key=lambda finding: (finding.update is None, finding.update or 0))
