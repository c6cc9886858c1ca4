"""Keep saved tensors, those that autograd saves between forward and backward, in host memory meanwhile.

A page is all that is saved from one unit's beginning to the next one's. Pages are written in forward and read in
backward, the last one first, so each needs to be on the device twice only:

    the next unit begins   the page is complete: it is copied to the host, while that unit computes
    and the one after      the copy is waited for, and the device's memory given up
    backward wants it      it is there: it was copied back while the page after it was in use; now the one before it is

So the device holds two pages, and the last one, of the last unit and of all that follows it (head, loss), never leaves:
backward begins with it. With checkpointing inside a unit a page is that unit's input.

A storage is moved once, however many views of it are saved, and only if it has no other holder, because moving it would
free nothing then. It is left to the next page instead. So attention masks and rotation tables, which every layer saves,
stay where they are, and no code can change a storage while it is copied.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventKind
from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.call import Call
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.features.offload import torch_private
from fullshard.features.offload.host import Copied, Host, StorageView, bytes_of
from fullshard.features.offload.storage import HostStorage, check_offloads_activations

SMALLEST_NBYTES = 2**16
"""Smaller storages stay: a copy of any size takes some microseconds, in which PCIe moves as much. Those are the
statistics of norms and attention, four bytes per token beside thousands."""


class Pages:
    """Know which pages of a model there are, and where."""

    def __init__(self, units: Sequence[Unit], host: Host) -> None:
        self._host, self._device = host, units[-1].mesh.device
        self._weights = frozenset(key for unit in units for bucket in unit.buckets for key in bucket.storage_ids)
        self._nothing = torch.empty(0, device=self._device)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._is_watching = self._ahead = False
        self._pages: list[Page] = []
        self._numbers = itertools.count()
        self.page: Page | None = None
        self._wanted: Page | None = None
        self._leaving: tuple[list[_Block], Copied] | None = None
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, units: Sequence[Unit]) -> Pages | None:
        """Return the pages of units of which at least one has its activations on the host."""
        storages = (unit.storage for unit in units if isinstance(unit.storage, HostStorage))
        return next((cls(units, storage.host) for storage in storages if storage.offload.activations), None)

    # -- forward ------------------------------------------------------------------------------------------------

    def begin(self, *, ahead: bool) -> None:
        """Begin a forward of the model; `ahead`: its backward may have two pages on the device.

        Do nothing without autograd, or under hooks of other code: a script that checkpoints the whole model has
        decided what to keep.
        """
        self.end()  # of a forward that was interrupted
        self._ahead, self._wanted = ahead, None
        self._pages = [page for page in self._pages if any(page.blocks)]
        if torch.is_grad_enabled() and not torch_private.are_saved_elsewhere():
            self._hooks.__enter__()
            self._is_watching = True

    def turn(self, unit: Unit) -> None:
        """Begin a unit: tensors saved from here on go to its page, and the page before is complete."""
        if not self._is_watching:
            return
        self._give_up()
        before, self.page = self.page, Page(unit, next(self._numbers))
        self._pages.append(self.page)
        if before is not None:
            self._send(before, self.page)

    def end(self) -> None:
        """End a forward, whether it is over or has failed."""
        if self._is_watching:
            self._is_watching = False
            self._hooks.__exit__()
        self._give_up()

    def _send(self, page: Page, following: Page) -> None:
        """Copy the storages that only this page holds to the host, and leave the rest to the next page."""
        if not page.unit.storage.offload.activations:
            return
        blocks = []
        for block in page.blocks:
            if torch_private.storage_uses(block.storage_id) > _uses_of_one_holder():
                following.add(block)
            else:
                blocks.append(block)
                self._blocks.pop(block.storage_id)  # the id may come again, with memory that is not this one's
        if blocks:
            tensors = [t for block in blocks if (t := block.on_device) is not None]
            copies, copied = self._host.copies(tensors, to_host=True)
            for block, copy in zip(blocks, copies, strict=True):
                block.on_host = copy
            self._leaving = blocks, copied
            page.emit(EventKind.TO_HOST, blocks)

    def _give_up(self) -> None:
        """Free the device's memory of the page under way, for the computation after the copy."""
        if self._leaving is not None:
            blocks, copied = self._leaving
            copied.wait()
            for block in blocks:
                block.on_device = None
            self._leaving = self._wanted = None  # a later use of that page has to bring it again

    # -- what autograd calls ------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if self.page is None or not self._may_move(tensor):
            # Not the tensor itself if the graph made it: that would be a cycle, which is never freed.
            return _Saved(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        block = self._blocks.get(torch_private.storage_id(storage))
        if block is None:
            block = self._blocks[torch_private.storage_id(storage)] = _Block(storage)
            self.page.add(block)
        elif block.page is not self.page:  # backward needs it first with the later one
            self.page.add(block)
        counter = tensor.detach()
        counter.data = self._nothing  # keeps count of changes, and no memory
        return _Saved(counter, tensor._version, block, StorageView.of(tensor))

    def _may_move(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != self._device.type:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_NBYTES or torch_private.storage_id(storage) in self._weights:
            return False
        return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        block, view = saved.block, saved.view
        found = saved.tensor._version
        if found != saved.version:
            where = "" if block is None else f", saved in unit {block.page.unit.name!r},"
            shape = tuple(saved.tensor.shape if view is None else view.size)
            raise LifecycleError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {shape}{where} is at version {found}; expected version {saved.version} instead",
                hint="change a copy of it; torch.autograd.set_detect_anomaly(True) says which operation saved it",
            )
        if block is None or view is None:
            return saved.tensor
        self.want(block.page)
        assert block.on_device is not None  # noqa: S101 -- its page was wanted
        return view.of_storage(block.on_device.untyped_storage())

    # -- backward -----------------------------------------------------------------------------------------------

    def want(self, page: Page) -> None:
        """Fetch the page that backward needs now: make computing wait for it, and start copying the one before."""
        if page is self._wanted:
            return
        self._bring(page)
        if page.arriving is not None:
            page.arriving.wait()
            page.arriving = None
        self._wanted = page
        while self._pages and not any(self._pages[-1].blocks):
            self._pages.pop()  # backward is done with it
        before = next((p for p in reversed(self._pages) if p.number < page.number and any(p.blocks)), None)
        if self._ahead and before is not None:
            self._bring(before)

    def _bring(self, page: Page) -> None:
        blocks = [block for block in page.blocks if block.on_device is None]
        if not blocks:
            return
        tensors = [t for block in blocks if (t := block.on_host) is not None]
        copies, page.arriving = self._host.copies(tensors, to_host=False)
        for block, copy in zip(blocks, copies, strict=True):
            block.on_device, block.on_host = copy, None
        page.emit(EventKind.TO_DEVICE, blocks)


class Page:
    """The tensors saved from one unit's beginning to the next one's; blocks live as long as the graph wants them."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.unit, self.number = unit, number
        self.arriving: Copied | None = None
        self._blocks: list[weakref.ref[_Block]] = []

    @property
    def blocks(self) -> Iterable[_Block]:
        """Yield the blocks that autograd still wants, and that no later page has taken."""
        for reference in self._blocks:
            block = reference()
            if block is not None and block.page is self:
                yield block

    def add(self, block: _Block) -> None:
        """Take a block, from the page before if that has it."""
        block.page = self
        self._blocks.append(weakref.ref(block))

    def emit(self, kind: EventKind, blocks: Iterable[_Block]) -> None:
        """Tell the sink of a copy."""
        self.unit.emit(kind, sum(block.nbytes for block in blocks), what="activations")


class _Block:
    """One storage that the graph saves tensors in; owned by those."""

    __slots__ = ("__weakref__", "nbytes", "on_device", "on_host", "page", "storage_id")

    page: Page

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage_id, self.nbytes = torch_private.storage_id(storage), storage.nbytes()
        self.on_device: torch.Tensor | None = bytes_of(storage)
        self.on_host: torch.Tensor | None = None


@dataclass(slots=True)
class _Saved:
    """A saved tensor's stand-in in the graph.

    Attributes:
        tensor: the tensor, if it stays; else an empty one that shares its count of changes.
        version: that count, when it was saved.
        block, view: the place of its data; None if it stays.
    """

    tensor: torch.Tensor
    version: int
    block: _Block | None = None
    view: StorageView | None = None


@functools.cache
def _uses_of_one_holder() -> int:
    """Return torch's count for a storage that a block alone holds; not all releases count Python's object."""
    tensor = torch.empty(1)
    block = _Block(tensor.untyped_storage())
    del tensor
    return torch_private.storage_uses(block.storage_id)


class ActivationOffload(Extension):
    """Move the pages of one model, if it has its activations on the host."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._pages: Pages | None = None
        self._page_of: weakref.WeakKeyDictionary[Call, Page] = weakref.WeakKeyDictionary()
        self._is_checked = False

    def materialized(self) -> None:
        """Find out whether any unit has its activations on the host."""
        self._pages = Pages.of(self.model.units)

    def forward_begins(self) -> None:
        """Begin with the first page."""
        if self._pages is None:
            return
        if not self._is_checked:
            check_offloads_activations(len(self.model.units))
            self._is_checked = True
        self._pages.begin(ahead=self.model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE)

    def call_begins(self, unit: Unit) -> None:
        """Begin a page before the unit saves anything."""
        if self._pages is not None:
            self._pages.turn(unit)

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Remember which page backward needs when it comes to the outputs of this forward."""
        if self._pages is not None and self._pages.page is not None:
            self._page_of[call] = self._pages.page

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Wait for the page, and bring the one before it."""
        if self._pages is not None and (page := self._page_of.get(call)) is not None:
            self._pages.want(page)

    def forward_ends(self, *, failed: bool) -> None:
        """Begin no more pages."""
        if self._pages is not None:
            self._pages.end()
