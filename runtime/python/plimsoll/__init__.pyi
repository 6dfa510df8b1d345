import os
import pathlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor, device as Device

_Function = TypeVar("_Function", bound=Callable[..., Any])

class Runtime:
    """Keeps one training loop of the process within a budget. Make it before the model, for what is allocated earlier is
    not counted, and put every iteration into `iteration()`:

        runtime = plimsoll.Runtime("20GiB", "gpt.policy", device="cuda")
        model = Model().cuda()
        for batch in batches:
            with runtime.iteration():
                train_step(model, batch)
        print(runtime)

    Within an iteration a tensor may be read by operators (`item`, `cpu`, `print`), by `torch.save`, `tolist`, `numpy` and DLPack,
    not by its address (`data_ptr`, a generator's `set_state`), unless an operator has just made or used it, or `touch` has. What
    shares its memory with NumPy or by DLPack stays. Between iterations all may be read.

    Kernels launched by Triton, or by most extensions of apex and those of causal-conv1d, flash-attn and mamba-ssm, find what they are
    given, which is kept or swapped from then on, not computed again. For functions of other extensions in C++ that launch kernels
    themselves see `by_address`.

    What `torch.compile` makes of a function is one operator: what it reads is there while it runs, and nothing within is evicted.
    Compile layers rather than the whole model. Leave CUDA graphs off, which go on with addresses that tensors have left; those of
    `torch.compile` are.

    It may be made, used and asked for its report in any thread; an iteration is of the operators of the thread that began it, and
    of its backward passes. Threads that `threading` starts after this package was imported stand by: what they use of an iteration's
    tensors is brought back for them. See `stand_by` for others.

    A process that is forked within an iteration is left alone, as are those of a DataLoader, and has nothing of the tensors
    that are evicted at that moment.
    """

    budget: int
    """Bytes. To set it takes a text as well, from the next iteration on."""

    def __init__(
        self,
        budget: int | str,
        policy: str | os.PathLike[str] | None = None,
        *,
        device: str | Device = "cpu",
        swap: bool | None = None,
        recompute: bool | None = None,
        host_limit: int | str | None = None,
        log_events: bool = False,
    ) -> None:
        """
        budget: bytes of the device that are never exceeded, or a text such as "512MiB" (without a unit, bytes).
        policy: path of a policy file, or the name of a baseline. Without, plans are searched for.
        device: "cpu", "cuda" or "cuda:N", as a text or a torch.device.
        swap, recompute: whether to evict so; as the policy was trained unless told.
        host_limit: most memory of the host that copies may take; page-locked beside a GPU, where it is 64 GiB unless told.
        log_events: for `write_chrome_trace`.

        Raises ValueError for what is no budget or no device, OSError for a policy file that cannot be read, RuntimeError for
        a device that cannot be used.
        """

    def iteration(self) -> Guard:
        """The next iteration, for `with`: forward, backward, the optimizer's step, and letting go of gradients or not. At its end every
        storage is resident again. Where that takes more than the budget, as after a forward pass alone, it is exceeded there; stderr
        says so once, and the report how much.

        Where no room is left, operators in it raise torch.OutOfMemoryError; no tensor is lost. Raises RuntimeError where
        another iteration is under way.
        """

    def detect(self) -> Loop:
        """For a loop that cannot be marked, such as a trainer's: all of it for one `with`. Iterations are found, and until then
        what has to be evicted is. No tensor may be read by its address meanwhile. Raises RuntimeError as `iteration` does.

        And for a loop whose parameters, gradients and optimizer's state exceed the budget: what does not fit is away from one
        iteration to the next. Make a model within that exceeds the budget by itself, and save what you want to save within. At
        the end every storage is resident, whatever that takes.

            with runtime.detect() as loop:
                for batch in batches:
                    loop.mark()
                    train_step(model, batch)
        """

    def report(self) -> dict[str, Any]:
        """What the loop has done so far: the fields of the runtime's `Report`, bytes and ns. `str(runtime)` is for people."""

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what happened when, for Perfetto. Empty without `log_events`. Raises OSError."""

    def save_traces(self, folder: str | os.PathLike[str], family: str) -> list[pathlib.Path]:
        """Writes the programs of the loop that are known so far as traces into `folder`, for `plimsoll train --traces`, and returns their
        paths: each at those sizes that it was planned for and timed at; on a GPU that is within a plan, some iterations after its
        first one. Files are named after `family`, which is to be that of the model, and what they do, so several jobs may write into
        one folder; the same program is the same file there. Raises OSError, and ValueError for a family that no file can be named
        after.
        """

class Guard:
    """Left by the thread that entered it; by another one it raises RuntimeError. So does leaving it where storages cannot be brought
    back, unless the program has raised something itself: the next one that is entered tries again."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool: ...

class Loop(Guard):
    def mark(self) -> None:
        """An iteration begins here; none is looked for from now on. Raises RuntimeError in another thread."""

def stand_by() -> None:
    """To be called once in a thread that was started before this package was imported, or not by `threading`, and that uses tensors
    of an iteration which is another thread's. Others do by themselves.
    """

def by_address(function: _Function) -> _Function: ...
def touch(*tensors: Tensor, read: Sequence[Tensor] = ()) -> None: ...
