"""The progress bar of a run."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """Steps done, with loss, accuracy and bytes per step; silent in all processes but one."""

    def __init__(self, name: str, steps: int, *, shows: bool):
        """Makes the bar of one run."""
        self._progress = Progress(
            TextColumn("{task.description:>16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scores]}"),
            TimeElapsedColumn(),
            disable=not shows,
        )
        self._task = self._progress.add_task(name, total=steps, scores="compiling")
        self._has_step = False

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.update(self._task, visible=self._has_step)  # no bar of a run that could not start
        self._progress.stop()

    def say(self, message: str) -> None:
        """Shows a line above the bar."""
        self._progress.console.print(message, highlight=False)

    def update(self, step: int, loss: float, accuracy: float, bytes_per_step: float) -> None:
        """Shows the state after a step; loss and accuracy are those of the step's batch."""
        self._has_step = True
        scores = f"loss {loss:.3f} accuracy {accuracy:.3f} {bytes_per_step:,.0f} B/step"
        self._progress.update(self._task, completed=step, scores=scores)
