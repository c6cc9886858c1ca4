"""Plans of weights that are quantized at rest: bytes of the forms, in the engine's buckets.

pytest tests/plan/test_plan_at_rest.py
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fullshard.config.sharding import Form
from fullshard.core.errors import ConfigError
from fullshard.core.forms import FORMS
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import Plan, changes_that_fit, evaluate, notes_of
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.report import as_dict
from tests.plan_table import table, written


def plan_of(model: str, devices: str, **settings: Any) -> Plan:
    return evaluate(load_model(model)[0], Job.of({"method": "qlora", **settings}), parse_cluster(devices))


def test_the_words_are_the_forms() -> None:
    assert get_args(Form) == tuple(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_shards_and_messages_are_codes_and_scales(form: str) -> None:
    plan, plain = (
        plan_of("Qwen3-30B-A3B", "4xA100", method="lora", lora_targets="q_proj,v_proj", **more)
        for more in ({"quantize": form}, {})
    )
    per_element = FORMS[form].nbytes(2**20) / 2**20
    whole, coded = plain.setting.layout.units[0], plan.setting.layout.units[0]
    assert [bucket.form for bucket in coded.coded] == [FORMS[form]]
    (bucket,) = coded.coded
    elements = bucket.layout.numel
    assert bucket.main_nbytes == pytest.approx(per_element * elements / 4, rel=1e-3)
    assert bucket.gather_message_nbytes == bucket.main_nbytes == bucket.device_nbytes
    assert bucket.full_nbytes == pytest.approx(2 * elements, rel=1e-3)
    sent, before = (sum(b.gather_message_nbytes for b in unit.buckets) for unit in (coded, whole))
    assert sent / before < per_element / 2 + 0.01
    assert plan.time.copies > plain.time.copies
    assert plan.memory.checkpoint < (per_element + 0.1) * plan.parameters


def test_bounds_of_nf4() -> None:
    for form, most in (("nf4", 0.57), ("nf4-double", 0.53)):
        plan = plan_of("Qwen3-30B-A3B", "2xRTX4090", quantize=form)
        buckets = [bucket for unit in plan.setting.layout.units for bucket in unit.coded]
        assert sum(b.main_nbytes for b in buckets) <= most * sum(b.layout.numel for b in buckets) / 2
        assert sum(b.gather_message_nbytes for b in buckets) <= 0.29 * sum(b.full_nbytes for b in buckets) / 2


def test_a_mixture_on_two_small_cards() -> None:
    """The question of which the answer was an error, because bitsandbytes leaves experts in 16 bits."""
    plan = plan_of("Qwen3-30B-A3B", "2xRTX4090")
    assert plan.confidence == "does not fit"
    assert changes_that_fit(plan)[0].words == "full activation checkpointing"
    fitting = plan_of("Qwen3-30B-A3B", "2xRTX4090", checkpointing="full")
    assert fitting.confidence == "fits"
    said = "2% of the weights (635.1 M of 30.5 B) stay in 16 or 32 bits; 29.0 B without such a layer are nf4-double at"
    assert any(note.startswith(said) for note in notes_of(fitting))
    rest = fitting.at_rest
    assert rest is not None and rest.form == "nf4-double"
    assert rest.nbytes / GIB == pytest.approx(6.97, abs=0.01)
    assert rest.peak - rest.whole == 2 * rest.message
    assert as_dict(fitting)["at_rest"]["seconds"] == rest.seconds > 0
    dense = plan_of("Llama-3-8B", "2xRTX4090")
    assert dense.at_rest is None and as_dict(dense)["at_rest"] is None


def test_the_codes_of_all_ranks_are_there_until_they_are_decoded() -> None:
    plan = plan_of("Qwen3-30B-A3B", "2xRTX4090", quantize="int8", checkpointing="full", backward_prefetch="NO_PREFETCH")
    alone = plan_of("Qwen3-30B-A3B", "1xH100", quantize="int8", checkpointing="full", backward_prefetch="NO_PREFETCH")
    name = plan.setting.layout.units[0].name
    for each, message in ((plan, plan.setting.layout.units[0].coded[0].main_nbytes * 2), (alone, 0)):
        moments = [m for m in each.memory.timeline if m.event.unit == name and "unshard" in m.event.kind.value]
        issued, decoding, ready = (moment.nbytes["gathered units"] for moment in moments[:3])
        assert decoding - ready == message
        assert decoding - issued == each.setting.layout.units[0].coded[0].full_nbytes


@pytest.mark.parametrize(("model", "form"), [("gpt-oss-120b", "mxfp4"), ("DeepSeek-V3", "fp8"), ("Kimi-K2", "fp8")])
def test_a_frozen_base_keeps_the_form_of_published_files(model: str, form: str) -> None:
    described, (note, *_) = load_model(model)
    assert described.published_as == form and f"the files are in {form}, which a frozen base keeps" in note
    plan = plan_of(model, "64xH200", method="lora", checkpointing="full")
    assert plan.fits and any(f"{form} at rest" in note for note in notes_of(plan))
    coded = {p.name.split(".")[-2] for p in plan.setting.model.parameters if p.form}
    assert "experts" in coded and ("o_proj" in coded) == (form == "fp8") and "gate" not in coded
    assert {p.form for p in plan.setting.model.parameters} == {"", form}


def test_the_form_of_published_files_is_proposed() -> None:
    plan = plan_of("gpt-oss-120b", "2xH100", method="lora", base_dtype="bfloat16")
    assert not plan.fits and plan.at_rest is None
    assert any("in the form of the files, mxfp4" in change.words for change in changes_that_fit(plan, most=20))


def test_what_is_trained_is_not_quantized() -> None:
    with pytest.raises(
        ConfigError,
        match="method full trains all weights, so quantize cannot be used with it\nhint: set method to lora",
    ):
        plan_of("Llama-3-8B", "8xH100", method="full", quantize="nf4")


def test_routers_and_small_matrices_are_left() -> None:
    plan = plan_of("Qwen3-Next-80B-A3B", "8xH100", quantize="nf4")
    left = {p.name.partition(".layers.0.")[2] for p in plan.setting.model.units[0].parameters if not p.form}
    left = {name for name in left if "lora" not in name}
    assert {"mlp.gate.weight", "mlp.shared_expert_gate.weight", "linear_attn.conv1d.weight"} <= left
    assert not [name for name in left if "experts." in name or ("proj" in name and "in_proj_ba" not in name)]


def test_the_table_is_what_the_planner_says() -> None:
    assert written() == table()
