"""The destination of each rank's output: the terminal, files, or both. The choices are the same as with torchrun."""

from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from fullshard.core.errors import ConfigError


class RankLogs(DefaultLogsSpecs):
    """The destination of each worker's output streams, in the form that torchelastic requires.

    Unless the user asked for log files, the first rank of a host writes directly to the terminal, so that its progress
    bars work. The output of the other ranks is shown with a prefix, and passes through temporary files.

    Attributes:
        variables: additional environment variables for every worker.
    """

    def __init__(self, directory: Path, nproc: int, tee: str | None, redirects: str | None, *, is_kept: bool) -> None:
        shown, written = _selection("tee", tee, is_kept), _selection("redirects", redirects, is_kept)
        if not is_kept:
            shown = dict.fromkeys(range(1, nproc), Std.ALL)
        elif tee is None and redirects is None:
            shown = Std.ALL
        super().__init__(str(directory), redirects=written, tee=shown)
        self.variables: dict[str, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of workers that are about to start, and choose their log files."""
        for environ in envs.values():
            environ |= self.variables
        return super().reify(envs)


def _selection(name: str, text: str | None, is_kept: bool) -> Std | dict[int, Std]:
    if text is None:
        return Std.NONE
    if not is_kept:
        raise ConfigError(f"--{name} writes to files, but --log_dir is not set", hint="add --log_dir DIRECTORY")
    try:
        return Std.from_str(text)
    except ValueError:
        raise ConfigError(
            f"--{name} must be 0 to 3, or RANK:0..3 separated by commas, got {text!r}",
            hint="use 1 for standard output, 2 for standard error, or 3 for both; 0:3,1:1 sets them by local rank",
        ) from None
