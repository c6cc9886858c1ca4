"""Keep the tensors that autograd saves in host memory between forward and backward.

A page contains all tensors that are saved from the beginning of one unit until the beginning of the next. Forward
writes pages, and backward reads them in reverse order:

    the next unit begins    the page is complete and is copied to the host while that unit computes
    the unit after begins   the device waits for the copy and frees the page's memory
    backward reads a page   it was copied back while backward used the page that follows it; now the copy of the page
                            that precedes it starts

The device therefore holds two pages, plus the last one. The page of the last unit and of all computation that follows
(head, loss) stays on the device, because backward starts with it.

A storage is copied only once, even if several views of it are saved, and only if nothing else holds it. Otherwise,
copying would not free any memory, so the storage is passed on to the next page. Attention masks and rotary tables,
which every layer saves, therefore stay on the device. This rule also ensures that no code can change a storage while it
is copied.
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
"""Smaller storages stay on the device. Every copy takes at least several microseconds, in which PCIe could transfer
this many bytes. Most small storages are statistics of norms and attention. They have four bytes per token, compared
with thousands for other tensors."""


class Pages:
    """Holds the pages of one model, and moves them between device and host."""

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
        """Create the pages for a list of units. Return None if no unit offloads its activations to the host."""
        storages = (unit.storage for unit in units if isinstance(unit.storage, HostStorage))
        return next((cls(units, storage.host) for storage in storages if storage.offload.activations), None)

    def begin(self, *, ahead: bool) -> None:
        """Start to record pages in a forward of the model.

        If `ahead` is set, backward copies the next page while it uses one, so that two pages are on the device. Do
        nothing if autograd is disabled, or if other hooks for saved tensors are active: a script that checkpoints the
        complete model has already decided what to keep.
        """
        self.end()  # in case a forward was interrupted
        self._ahead, self._wanted = ahead, None
        self._pages = [page for page in self._pages if any(page.blocks)]
        if torch.is_grad_enabled() and not torch_private.are_saved_elsewhere():
            self._hooks.__enter__()
            self._is_watching = True

    def turn(self, unit: Unit) -> None:
        """Start a unit's page for all tensors saved from now on, and start to copy the previous page to the host."""
        if not self._is_watching:
            return
        self._give_up()
        before, self.page = self.page, Page(unit, next(self._numbers))
        self._pages.append(self.page)
        if before is not None:
            self._send(before, self.page)

    def end(self) -> None:
        """End the forward of the model, whether it has completed or failed."""
        if self._is_watching:
            self._is_watching = False
            self._hooks.__exit__()
        self._give_up()

    def _send(self, page: Page, following: Page) -> None:
        """Start to copy the page's storages to the host. Pass storages with other holders on to the next page."""
        if not page.unit.storage.offload.activations:
            return
        blocks = []
        for block in page.blocks:
            if torch_private.storage_uses(block.storage_id) > _uses_of_one_holder():
                following.add(block)
            else:
                blocks.append(block)
                self._blocks.pop(block.storage_id)  # the id may be reused for other memory
        if blocks:
            tensors = [t for block in blocks if (t := block.on_device) is not None]
            copies, copied = self._host.copies(tensors, to_host=True)
            for block, copy in zip(blocks, copies, strict=True):
                block.on_host = copy
            self._leaving = blocks, copied
            page.emit(EventKind.TO_HOST, blocks)

    def _give_up(self) -> None:
        """Wait for the copy of the page that was last sent to the host, and free its device memory."""
        if self._leaving is not None:
            blocks, copied = self._leaving
            copied.wait()
            for block in blocks:
                block.on_device = None
            self._leaving = self._wanted = None  # later uses of that page must fetch it again

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if self.page is None or not self._may_move(tensor):
            # Detach a tensor created by the graph; otherwise, it would form a cycle that is never freed.
            return _Saved(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = tensor.untyped_storage()
        block = self._blocks.get(torch_private.storage_id(storage))
        if block is None:
            block = self._blocks[torch_private.storage_id(storage)] = _Block(storage)
            self.page.add(block)
        elif block.page is not self.page:  # backward needs the later page first
            self.page.add(block)
        counter = tensor.detach()
        counter.data = self._nothing  # shares the version counter, but holds no memory
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
            where = "" if block is None else f", saved in {block.page.unit},"
            shape = tuple(saved.tensor.shape if view is None else view.size)
            raise LifecycleError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {shape}{where} is at version {found}; expected version {saved.version} instead",
                hint="change a copy; torch.autograd.set_detect_anomaly(True) finds the operation that saved it",
            )
        if block is None or view is None:
            return saved.tensor
        self.want(block.page)
        assert block.on_device is not None  # noqa: S101 -- its page was wanted
        return view.of_storage(block.on_device.untyped_storage())

    def want(self, page: Page) -> None:
        """Wait for the page that backward needs now, and start to copy the page that it needs next."""
        if page is self._wanted:
            return
        self._bring(page)
        if page.arriving is not None:
            page.arriving.wait()
            page.arriving = None
        self._wanted = page
        while self._pages and not any(self._pages[-1].blocks):
            self._pages.pop()  # backward has finished with this page
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
    """The tensors saved between the beginnings of two units. The autograd graph keeps its blocks alive."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.unit, self.number = unit, number
        self.arriving: Copied | None = None
        self._blocks: list[weakref.ref[_Block]] = []

    @property
    def blocks(self) -> Iterable[_Block]:
        """Yield the blocks that autograd still needs and that no later page has taken over."""
        for reference in self._blocks:
            block = reference()
            if block is not None and block.page is self:
                yield block

    def add(self, block: _Block) -> None:
        """Add a block to this page, and remove it from the page that it was in."""
        block.page = self
        self._blocks.append(weakref.ref(block))

    def emit(self, kind: EventKind, blocks: Iterable[_Block]) -> None:
        """Report a copy of these blocks to the event sink."""
        self.unit.emit(kind, sum(block.nbytes for block in blocks), what="activations")


class _Block:
    """A storage that contains saved tensors. The saved tensors in the autograd graph keep it alive."""

    __slots__ = ("__weakref__", "nbytes", "on_device", "on_host", "page", "storage_id")

    page: Page

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage_id, self.nbytes = torch_private.storage_id(storage), storage.nbytes()
        self.on_device: torch.Tensor | None = bytes_of(storage)
        self.on_host: torch.Tensor | None = None


@dataclass(slots=True)
class _Saved:
    """Stands for a saved tensor in the autograd graph. A moved one leaves an empty tensor with its version counter."""

    tensor: torch.Tensor
    version: int
    block: _Block | None = None
    view: StorageView | None = None


@functools.cache
def _uses_of_one_holder() -> int:
    """Return the use count that torch reports if only a block holds a storage. It differs between torch releases."""
    tensor = torch.empty(1)
    block = _Block(tensor.untyped_storage())
    del tensor
    return torch_private.storage_uses(block.storage_id)


class ActivationOffload(Extension):
    """Offloads the activations of one model to the host, page by page, if the model is configured to do so."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._pages: Pages | None = None
        self._page_of: weakref.WeakKeyDictionary[Call, Page] = weakref.WeakKeyDictionary()
        self._is_checked = False

    def materialized(self) -> None:
        """Create the pages if any unit offloads its activations to the host."""
        self._pages = Pages.of(self.model.units)

    def forward_begins(self) -> None:
        """Start to record pages. Raise an error if the model has only one unit."""
        if self._pages is None:
            return
        if not self._is_checked:
            check_offloads_activations(len(self.model.units))
            self._is_checked = True
        self._pages.begin(ahead=self.model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE)

    def call_begins(self, unit: Unit) -> None:
        """Start the unit's page before the unit saves any tensors."""
        if self._pages is not None:
            self._pages.turn(unit)

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Remember which page backward needs when it reaches the outputs of this call."""
        if self._pages is not None and self._pages.page is not None:
            self._page_of[call] = self._pages.page

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Wait for the page of this call, and start to copy the page that backward needs next."""
        if self._pages is not None and (page := self._page_of.get(call)) is not None:
            self._pages.want(page)

    def forward_ends(self, *, failed: bool) -> None:
        """Stop recording pages."""
        if self._pages is not None:
            self._pages.end()
