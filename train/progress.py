"""The progress bar of a run."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """Steps done, with loss, accuracy and bytes per step; silent in all processes but one."""

    def __init__(self, name: str, steps: int, *, shows: bool):
        """Makes the bar of one run."""
        self._progress = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]:.3f}"),
            TextColumn("{task.fields[bytes_per_step]:,.0f} bytes/step"),
            TimeElapsedColumn(),
            disable=not shows,
        )
        self._task = self._progress.add_task(name, total=steps, loss=float("nan"), accuracy=0.0, bytes_per_step=0.0)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        """Shows a line above the bar."""
        self._progress.console.print(message, highlight=False)

    def update(self, step: int, loss: float, accuracy: float, bytes_per_step: float) -> None:
        """Shows the state after a step; loss and accuracy are those of the step's batch."""
        self._progress.update(self._task, completed=step, loss=loss, accuracy=accuracy, bytes_per_step=bytes_per_step)
