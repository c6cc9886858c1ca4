"""Each place where the engine waits for a stream, one at a time taken out: some program must give a wrong number then.

    python -m tests.simulated.mutations [words of its name]

says for each which program does. A change is made in a copy of the package, for a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TORCH_DIST, RESIZED = "comm/torch_dist.py", "comm/resized_buffer.py"
PACKINGS = "features/packed_messages.py"
OFFLOAD, ACTIVATIONS = "features/offload/host.py", "features/offload/pages.py"
STAGING = "checkpoint/staging.py"
SEQUENCES, CONTEXT = "features/sequence_parallel/attention.py", "api/context_parallel.py"
_STAGED = "block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)"


@dataclass(frozen=True)
class Mutation:
    """A change of one file of the package.

    Attributes:
        what: it takes out.
        file, old, new: what is where, once, and what stands there instead.
        found_by: the program that gives a wrong number then.
        also: file and line of what else is taken out, where either of two waits would do.
        is_race: two streams use memory in no order then; else it is the host that comes too early.
    """

    what: str
    file: str
    old: str
    new: str
    found_by: str
    also: tuple[tuple[str, str], ...] = ()
    is_race: bool = True

    @property
    def changed(self) -> dict[str, str]:
        """The changed files.

        Raises:
            ValueError: what is to be changed is not there, or more than once.
        """
        texts: dict[str, str] = {}
        for file, old, new in ((self.file, self.old, self.new), *((file, old, "") for file, old in self.also)):
            text = texts.get(file) or (SOURCE / "fullshard" / file).read_text()
            if text.count(old) != 1:
                raise ValueError(f"{file} has {text.count(old)} times what is to be changed: {old!r}")
            texts[file] = text.replace(old, new)
        return texts

    @contextmanager
    def applied(self) -> Iterator[Path]:
        """A folder with the changed package."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "fullshard"
            shutil.copytree(SOURCE / "fullshard", copy, ignore=shutil.ignore_patterns("__pycache__"))
            for file, text in self.changed.items():
                (copy / file).write_text(text)
            yield Path(folder)


MUTATIONS = (
    Mutation(
        "a gather or an all-reduce is not waited for",
        TORCH_DIST,
        "        for work in works:\n            work.wait()\n        return result",
        "        return result",
        "two ranks",
    ),
    Mutation(
        "a reduction is not waited for",
        TORCH_DIST,
        "        work.wait()\n        average = total",
        "        average = total",
        "two ranks",
    ),
    Mutation(
        "packed gradients are not waited for",
        PACKINGS,
        "            arriving = exchange.wait()\n",
        "            arriving = exchange.wait.__closure__[0].cell_contents\n",
        "packed",
    ),
    Mutation(
        "packed parameters are not waited for",
        PACKINGS,
        "                messages = arriving.pop().wait()\n",
        "                messages = arriving.pop().wait.__closure__[0].cell_contents\n",
        "packed",
    ),
    Mutation(
        "copies do not wait for what computes",
        OFFLOAD,
        "        stream.wait_stream(torch.accelerator.current_stream(self._device))\n",
        "",
        "main weights",
    ),
    Mutation(
        "computing does not wait for activations that arrive or leave",
        OFFLOAD,
        "            torch.accelerator.current_stream(self.device).wait_event(self.event)",
        "            pass",
        "activations",
    ),
    Mutation(
        "computing does not wait for a compute shard that arrives",
        OFFLOAD,
        "                copied.wait()\n                return work.wait()",
        "                return work.wait()",
        "everything",
    ),
    Mutation(
        "the memory of a gradient goes before it has left",
        OFFLOAD,
        "            self.copied.wait()\n        self.tensor = None",
        "            pass\n        self.tensor = None",
        "everything",
    ),
    Mutation(
        "the host does not wait for a gradient",
        OFFLOAD,
        "        if self.copied.event is not None:\n            self.copied.event.synchronize()\n",
        "",
        "hook, main weights",
        is_race=False,
    ),
    Mutation(
        "the host does not wait for copies that still read main weights",
        OFFLOAD,
        "            self._reading.synchronize()\n",
        "",
        "changed at once",
        is_race=False,
    ),
    Mutation(
        "the host does not wait for optimizer state",
        OFFLOAD,
        "        if self._pins:\n            torch.accelerator.current_stream(self._device).synchronize()",
        "        pass",
        "state looked at",
        is_race=False,
    ),
    Mutation(
        "activations: memory goes before they have left",
        ACTIVATIONS,
        "            copied.wait()\n",
        "",
        "activations",
    ),
    Mutation(
        "activations: backward does not wait until they arrive",
        ACTIVATIONS,
        "            page.arriving.wait()\n",
        "",
        "activations",
    ),
    Mutation(
        "optimizer state is not waited for",
        "features/offload/storage.py",
        "        host.finish()\n",
        "        pass\n",
        "state looked at",
        is_race=False,
    ),
    Mutation(
        "a save does not wait for its copies",
        STAGING,
        "            torch.accelerator.synchronize()\n",
        "            pass\n",
        "staged",
        is_race=False,
    ),
    Mutation(
        "after a forward copies may still read main weights",
        "engine/forward.py",
        "            unit.rest()\n        if not failed:\n            schedule.settle()  # after a forward without "
        "backward, the user may change main weights immediately\n",
        "            unit.rest()\n",
        "changed at once",
        is_race=False,
    ),
    Mutation(
        "after a backward and at the step copies may still read main weights",
        "engine/backward.py",
        "        self._clear()\n        self._schedule.settle()\n",
        "        self._clear()\n",
        "changed at once, frozen",  # gradients that arrive on the host have waited for everything else
        also=(
            (
                "engine/schedule.py",
                "        self.settle()  # a peer may still be reading main weights in place\n",
            ),
        ),
        is_race=False,
    ),
    Mutation(
        "without streams of their own copies may still read main weights",
        OFFLOAD,
        "            self._reading = torch.accelerator.current_stream(self._device).record_event()\n",
        "            pass\n",
        "changed at once, in turn",
        is_race=False,
    ),
    Mutation(
        "a hook does not wait for what it is given",
        "features/torch_compat/methods.py",
        "    stream.wait_stream(current)\n",
        "",
        "hook",
    ),
    Mutation(
        "a hook is not waited for",
        "features/torch_compat/methods.py",
        "    current.wait_stream(stream)\n",
        "",
        "hook",
    ),
    Mutation(
        "a scale is not waited for where gradients are on the host",
        "features/torch_tools/install.py",
        "        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()\n",
        "        pass\n",
        "scaled",
        is_race=False,
    ),
    Mutation(
        "a fused optimizer on the host does not wait for the scale",
        "features/offload/storage.py",
        "                    setattr(optimizer, name, value.cpu())\n",
        "                    pass\n",
        "scaled, fused",
        is_race=False,
    ),
    Mutation(
        "pieces of matrices are not waited for",
        "features/matrices/exchange.py",
        "            received = self.work.wait()\n",
        "            received = self.work.wait.__closure__[0].cell_contents\n",
        "matrices",
    ),
    Mutation(
        "what a parameter is put together of is not waited for",
        "features/extended/bucket.py",
        "        for work in works:\n            work.wait()\n        rows",
        "        rows",
        "composed",
    ),
    Mutation(
        "what was gathered ahead and is not used goes before it is there",
        "engine/unit_parameters.py",
        "                for bucket in self.buckets:\n                    bucket.wait_unshard()\n"
        "        if self.state is UnitState.UNSHARDED:",
        "                pass\n        if self.state is UnitState.UNSHARDED:",
        "left out",
    ),
    Mutation(
        "a gather does not wait for who changes main weights elsewhere",
        "features/torch_compat/library_methods.py",
        "            self.post_optim_event.wait()\n",
        "",
        "updated beside",
    ),
    Mutation(
        "what ranks have seen of gradients that are not finite is not waited for",
        "features/nonfinite.py",
        "                work.wait()\n            self._alarm",
        "                pass\n            self._alarm",
        "not finite on one rank",
    ),
    Mutation(
        "a reduction is dropped on its way, after a backward that failed",
        "engine/gradient.py",
        "                work.wait()  # it writes to memory that is about to be freed\n",
        "                pass\n",
        "failed half-way",
    ),
    *(
        Mutation(f"{what} not waited for", file, old, f"{old[:-1]}, async_op=True)", found_by)
        for what, file, old, found_by in (
            (
                "heads that are exchanged for parts of sequences are",
                SEQUENCES,
                "dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)",
                "sequence parallel",
            ),
            (
                "positions and padding of whole sequences are",
                SEQUENCES,
                "dist.all_gather(list(of_all), own.contiguous(), group=self.group)",
                "sequence parallel",
            ),
            (
                "positions, keys and values are",
                CONTEXT,
                "dist.all_gather(parts, part, group=group)",
                "context parallel",
            ),
            ("their gradients are", CONTEXT, "dist.all_reduce(gradient, group=ctx.group)", "context parallel"),
        )
    ),
    *(
        Mutation(f"the host waits {what}", file, old, new, found_by, is_race=False)
        for what, file, old, new, found_by in (
            ("as its memory is not page-locked", OFFLOAD, ", pin_memory=self._pins)", ")", "host waits"),
            ("for gradients", OFFLOAD, "non_blocking=self._to_host is not None", "non_blocking=False", "host waits"),
            ("for optimizer state", OFFLOAD, "non_blocking=self._pins", "non_blocking=False", "host waits"),
            ("for activations", OFFLOAD, "non_blocking=stream is not None", "non_blocking=False", "host waits"),
            ("to gather", RESIZED, "non_blocking=is_apart and main.is_pinned()", "non_blocking=False", "host waits"),
            (
                "to pack",
                RESIZED,
                "(self.full.device, non_blocking=main.is_pinned())",
                "(self.full.device)",
                "host waits, two ranks",
            ),
            (
                "for a compute shard",
                "features/offload/storage.py",
                "non_blocking=cast.is_pinned()",
                "non_blocking=False",
                "host waits",
            ),
            ("for each tensor of a save", STAGING, "non_blocking=True", "non_blocking=False", "host waits"),
            (
                "to save to what is not page-locked",
                STAGING,
                _STAGED,
                _STAGED.replace(", pin_memory=pinned", ""),
                "host waits",
            ),
        )
    ),
)


def run(source: Path, expected: Path, *names: str) -> list[str]:
    """Which of these programs (of all) give a wrong number with the package in a folder, and in which orders.

    The first time it makes what is expected.
    """
    return _run(source, "tests.simulated.programs", str(expected), *names).split("\n")[:-1]


def races(source: Path, *names: str) -> str:
    """What two streams use in no order in these programs, with the package in a folder, however those end."""
    return _run(source, "tests.simulated.races", *names, check=False)


def _run(source: Path, module: str, *arguments: str, check: bool = True) -> str:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(source), str(SOURCE.parent)]), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and (check or not done.stdout):
        raise RuntimeError(f"the programs did not end well:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "expected"
        run(SOURCE, expected)
        for mutation in MUTATIONS:
            if all(word in mutation.what for word in sys.argv[1:]):
                with mutation.applied() as source:
                    found = run(source, expected, mutation.found_by) or run(source, expected)
                    print(f"{mutation.what}:", "; ".join(found) or "NOT FOUND", flush=True)


if __name__ == "__main__":
    main()
