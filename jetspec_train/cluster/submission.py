"""Handing a written batch script to Slurm through submitit.

submitit's own jobs run a pickled function; ours run a script that a person can read and submit again. So its executor
is given the script's text and the conditions under which it starts; how ``sbatch`` is called, how its answer is read
and where a copy of what was submitted lies (``run_dir/slurm/submitted/NUMBER_submission.sh``) are submitit's.
"""

from __future__ import annotations

from pathlib import Path

from submitit.slurm.slurm import SlurmExecutor


class ScriptExecutor(SlurmExecutor):
    """Submits scripts. Raises RuntimeError where there is no ``srun``."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._after: str | None = None

    def submit_script(self, script: Path, after: str | None = None) -> str:
        """Submit one script, which starts when job ``after`` has succeeded; returns its number.

        If that job fails, Slurm drops this one. Raises submitit's FailedJobError with Slurm's words if it is refused.
        """
        self._after = after
        return str(self._submit_command(str(script)).job_id)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return Path(command).read_text()

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", *conditions(self._after), str(submission_file_path)]


def conditions(after: str | None) -> list[str]:
    """The options of ``sbatch`` by which a job waits for another's success."""
    return [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
