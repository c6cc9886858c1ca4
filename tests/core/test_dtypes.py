"""Dtypes by role, and what of a bucket is where: the rules that the engine and the planner share, against torch."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from fullshard.core.bucket import BucketKey
from fullshard.core.dtypes import COMPUTE, FLOATING, HALF, ITEMSIZES, Dtypes, collected, itemsize, main_dtype, wider
from fullshard.core.errors import ConfigError
from fullshard.core.offload import Offload
from fullshard.engine.precision import cast_floating, dtype_name, torch_dtype
from fullshard.features import MixedPrecisionPolicy
from fullshard.plan.buckets import CountedBucket

TRAINED_IN = ("float64", "float32", "bfloat16", "float16")
MIXED = Dtypes("bfloat16")


def test_every_dtype_is_as_torch_has_it() -> None:
    for name, nbytes in ITEMSIZES.items():
        dtype = torch_dtype(name)
        assert (dtype_name(dtype), dtype.itemsize) == (name, nbytes)
        assert dtype.is_floating_point == (name in FLOATING)
    with pytest.raises(ConfigError, match=r"unknown dtype 'float31'\n.*float64, float32"):
        itemsize("float31")


@pytest.mark.parametrize(("one", "other"), list(itertools.product(TRAINED_IN, TRAINED_IN)))
def test_the_wider_dtype_is_torchs_promotion(one: str, other: str) -> None:
    assert torch_dtype(wider(one, other)) == torch.promote_types(torch_dtype(one), torch_dtype(other))


@pytest.mark.parametrize(
    ("stored", "options", "compute"),
    [
        ("float32", {}, "bfloat16"),
        ("float16", {}, "bfloat16"),
        ("float32", {"exact": True}, "float32"),
        ("float32", {"statistics": "float32"}, "float32"),
        ("uint8", {}, "uint8"),
        ("complex64", {}, "complex64"),
    ],
)
def test_what_is_computed_in(stored: str, options: dict[str, object], compute: str) -> None:
    assert MIXED.compute(stored, **options) == compute  # type: ignore[arg-type]
    assert Dtypes().compute(stored, statistics="float64") == stored


@pytest.mark.parametrize(
    ("dtypes", "stored", "reduce"),
    [
        (Dtypes(), "float32", "float32"),
        (Dtypes(), "bfloat16", "float32"),
        (Dtypes(), "float64", "float64"),
        (MIXED, "float32", "float32"),
        (MIXED, "float64", "float32"),
        (Dtypes("float64"), "float32", "float64"),
        (Dtypes(reduce_dtype="bfloat16"), "float64", "bfloat16"),
        (Dtypes("bfloat16", "bfloat16"), "complex64", "complex64"),
    ],
)
def test_what_gradients_are_summed_in(dtypes: Dtypes, stored: str, reduce: str) -> None:
    assert dtypes.reduce(stored) == reduce


@pytest.mark.parametrize(
    ("compute", "reduce", "widens", "expected"),
    [
        ("bfloat16", "float32", True, "bfloat16"),
        ("bfloat16", "float32", False, "float32"),
        ("float32", "bfloat16", True, "bfloat16"),
        ("bfloat16", "float16", True, "float16"),
        ("float32", "float32", True, "float32"),
    ],
)
def test_what_gradients_are_collected_in(compute: str, reduce: str, widens: bool, expected: str) -> None:
    assert collected(compute, reduce, widens=widens) == expected


def test_main_weights_in_half_precision_become_float32() -> None:
    for mode, stored, trainable in itertools.product(COMPUTE, TRAINED_IN, (True, False)):
        is_upcast = mode != "no" and stored in HALF and trainable
        assert main_dtype(stored, trainable=trainable, mode=mode) == ("float32" if is_upcast else stored)


def test_a_policy_names_its_dtypes() -> None:
    policy = MixedPrecisionPolicy(torch.float32, torch.float64, gather_as=torch.bfloat16, reduce_as=torch.int8)
    assert policy.dtypes_of() == Dtypes("float32", "float64", "bfloat16", "int8")
    assert MixedPrecisionPolicy().dtypes_of() == Dtypes()


def make_plan(
    dtypes: Dtypes = MIXED,
    offload: Mapping[str, bool] | None = None,
    *,
    trainable: bool = True,
    dtype: str = "float32",
    exact: bool = False,
) -> CountedBucket:
    key = BucketKey.of(dtypes, dtype, trainable=trainable, exact=exact, statistics=None)
    return CountedBucket.of(key, [(8, 4), (4,)], dtypes, world_size=2, offload=Offload(**(offload or {})))


def test_what_keeps_parameters_apart() -> None:
    keys = {
        BucketKey.of(MIXED, "float32", trainable=True, exact=False, statistics=None),
        BucketKey.of(MIXED, "bfloat16", trainable=True, exact=False, statistics=None),
        BucketKey.of(MIXED, "float32", trainable=False, exact=False, statistics=None),
        BucketKey.of(MIXED, "float32", trainable=True, exact=False, statistics="float32"),
        BucketKey.of(MIXED, "float32", trainable=False, exact=True, statistics=None),
    }
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("trainable", "options", "main", "gathered", "visits", "device", "host"),
    [
        (True, {}, False, False, False, "main", ""),
        (True, {"optimizer_state": True}, False, False, True, "main", ""),
        (True, {"main_weights": True, "optimizer_state": True}, True, False, False, "compute", "main"),
        (
            True,
            {"compute_shards": True, "main_weights": True, "optimizer_state": True},
            *(True, True, False, "", "main compute"),
        ),
        (True, {"compute_shards": True}, False, False, False, "main", ""),
        (False, {"compute_shards": True}, True, True, False, "", "main compute"),
        (False, {"main_weights": True, "optimizer_state": True}, False, False, True, "main", ""),
    ],
)
def test_what_is_on_the_host(
    trainable: bool, options: dict[str, bool], main: bool, gathered: bool, visits: bool, device: str, host: str
) -> None:
    plan = make_plan(offload=options, trainable=trainable)
    nbytes = {"main": plan.main_nbytes, "compute": plan.compute_shard_nbytes}
    assert nbytes == {"main": 4 * 24, "compute": 2 * 24}
    assert (plan.main_is_on_host, plan.is_gathered_from_host, plan.state_visits_device) == (main, gathered, visits)
    assert plan.device_nbytes == sum(nbytes[name] for name in device.split())
    assert sum(plan.host_buffers) == sum(nbytes[name] for name in host.split())
    assert plan.compute_shard_is_main == (not main)


def test_what_is_packed_is_copied_exact() -> None:
    """Packing is done on the device: what lies on the host is the stored dtype, and one piece with the main weights."""
    offload = {"compute_shards": True, "main_weights": True, "optimizer_state": True}
    packed = make_plan(Dtypes("float16", gather_as="int8"), offload)
    assert (packed.weights_as, packed.compute_shard_dtype, packed.compute_shard_is_main) == ("int8", "float32", True)
    assert packed.host_buffers == (packed.main_nbytes,)
    assert make_plan(offload=offload).compute_shard_dtype == "bfloat16"


def test_what_is_rounded_to_be_sent() -> None:
    dtypes = Dtypes("bfloat16", gather_as="int8", reduce_as="bfloat16")
    plan = make_plan(dtypes)
    assert (plan.weights_as, plan.gradients_as) == ("int8", "bfloat16")
    assert (plan.gather_message_nbytes, plan.reduce_message_nbytes) == (32 + 16, 2 * 24)
    assert make_plan(Dtypes("bfloat16", gather_as="bfloat16", reduce_as="bfloat16")).weights_as is None
    assert make_plan(dtypes, dtype="uint8", trainable=False, exact=True).weights_as is None
    assert make_plan(dtypes, trainable=False, exact=True).weights_as is None  # a scale, float32 and exact


def test_what_gradients_are_accumulated_in() -> None:
    """No narrower than the sum over ranks, nor than the weights: the optimizer reads one as the other."""
    for stored, reduce, expected in (
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "float32"),
    ):
        plan = make_plan(Dtypes(reduce_dtype=reduce), dtype=stored)
        assert plan.main_gradient_dtype == expected
        assert plan.main_gradient_nbytes == itemsize(expected) * plan.layout.shard_numel


def test_intervals_are_aligned_for_the_narrowest_dtype_they_are_sent_in() -> None:
    assert [make_plan(Dtypes(*names)).layout.alignment for names in ((), ("bfloat16",), (None, "float16"))] == [4, 8, 8]
    assert make_plan(dtype="uint8", trainable=False).layout.alignment == 16


def test_whether_unsharding_is_nothing() -> None:
    for world_size, dtypes, offload, expected in (
        (1, Dtypes(), Offload(), True),
        (2, Dtypes(), Offload(), False),
        (1, MIXED, Offload(), False),
        (1, Dtypes(), Offload(main_weights=True, optimizer_state=True), False),
    ):
        key = BucketKey.of(dtypes, "float32", trainable=True, exact=False, statistics=None)
        plan = CountedBucket.of(key, [(4,)], dtypes, world_size=world_size, offload=offload)
        assert plan.shares_main == expected


class Features(dict[str, torch.Tensor]):
    """A dictionary that is made of something else than its entries."""

    def __init__(self, rate: int, **entries: torch.Tensor) -> None:
        super().__init__(**entries)
        self.rate = rate


@pytest.mark.parametrize(
    "make",
    [
        dict[str, Any],
        OrderedDict[str, Any],
        lambda **entries: defaultdict(list, **entries),
        lambda **entries: MappingProxyType(entries),
        lambda **entries: Features(16, **entries),
    ],
    ids=["dict", "OrderedDict", "defaultdict", "mappingproxy", "subclass"],
)
def test_a_mapping_that_is_cast_stays_what_it_is(make: Any) -> None:
    given = make(x=torch.ones(2), y=torch.ones(2, dtype=torch.int64))
    cast = cast_floating(given, torch.bfloat16)
    assert type(cast) is type(given) and list(cast) == ["x", "y"]
    assert cast["x"].dtype == torch.bfloat16 and cast["y"] is given["y"] and given["x"].dtype == torch.float32
    for name in ("default_factory", "rate"):
        assert getattr(cast, name, None) == getattr(given, name, None)
