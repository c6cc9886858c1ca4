"""The pictures of docs/layout.md, from the layout itself. Write them anew: `python docs/site/pictures.py`."""

from __future__ import annotations

from pathlib import Path

from fullshard.core.layout import BucketLayout, ParameterSpec

DOCS = Path(__file__).parents[1]
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
GRAY, INK = "#d9dde3", "#1f2430"
WORLD_SIZE = 4
PARAMETERS = (
    ParameterSpec("norm", (16,)),
    ParameterSpec("query", (16, 16)),
    ParameterSpec("out", (16, 16)),
    ParameterSpec("up", (30, 16)),
    ParameterSpec("bias", (30,)),
)
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    '<rect width="100%" height="100%" fill="#ffffff"/>'
    '<defs><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="#8a93a3" stroke-width="2"/></pattern></defs>'
)


def box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """A rectangle that says what it is."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" fill="{fill}" '
        f'stroke="#ffffff"><title>{title}</title></rect>'
    )


def words(x: float, y: float, text: str, fill: str = INK, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}">{text}</text>'


def layout() -> str:
    """Parameters of a bucket above, who owns them below."""
    bucket = BucketLayout.build(PARAMETERS, itemsize=2, world_size=WORLD_SIZE)
    left, width, row = 10.0, 780.0, 46.0
    scale = width / bucket.full_numel
    parts = [HEAD.format(width=800, height=190)]
    parts.append(words(left, 20, "parameters, in the order of their definition", anchor="start"))
    end = 0
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        if offset > end:
            parts.append(box(left + end * scale, 30, (offset - end) * scale, row, "url(#pad)", "padding"))
        end = offset + spec.numel
        shape = " x ".join(map(str, spec.shape))
        parts.append(box(left + offset * scale, 30, spec.numel * scale, row, GRAY, f"{spec.name} ({shape})"))
        x = left + (offset + spec.numel / 2) * scale
        parts.append(words(x, 57, spec.name if spec.numel * scale > 30 else spec.name[0]))
    parts.append(box(left + end * scale, 30, (bucket.full_numel - end) * scale, row, "url(#pad)", "padding"))
    parts.append(words(left, 106, f"intervals of {bucket.shard_numel} elements", anchor="start"))
    for rank, color in enumerate(COLORS):
        start = bucket.rank_interval(rank).start
        x, each = left + start * scale, bucket.shard_numel * scale
        parts.append(box(x, 116, each, row, color, f"rank {rank}"))
        parts.append(words(x + each / 2, 143, f"rank {rank}", "#ffffff"))
        if rank:
            parts.append(
                f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="166" stroke="{INK}" stroke-width="1.5" '
                'stroke-dasharray="4 3"/>'
            )
    return "".join([*parts, words(400, 182, "dashed: where one rank's part ends"), "</svg>\n"])


def step() -> str:
    """When each of four units is gathered, computes, is freed and reduced."""
    units, left, wide, row, top = 4, 80.0, 54.0, 30.0, 40.0
    parts = [HEAD.format(width=800, height=230)]
    for name, at in (("forward", 1 + units / 2), ("backward", 1 + units + units * 0.8)):
        parts.append(words(left + at * wide, 24, name))
    for unit in range(units):
        y = top + unit * (row + 8)
        parts.append(words(70, y + 20, f"unit {unit}", anchor="end"))
        ahead, there = float(unit), 1.0 + unit
        back = 1 + units + (units - 1 - unit) * 1.6
        held = unit == units - 1  # the last is needed again at once
        spans = [(ahead, 1.0, COLORS[0], "gather"), (there, 1.0, COLORS[2], "compute")]
        if not held:
            spans.append((back - 1.6, 1.6, COLORS[0], "gather"))
        spans += [(back, 1.6, COLORS[2], "compute"), (back + 1.6, 1.6, COLORS[1], "reduce")]
        parts += [box(left + at * wide, y, length * wide, row, color, what) for at, length, color, what in spans]
    legend = ((COLORS[0], "gather"), (COLORS[2], "compute"), (COLORS[1], "reduce"))
    for index, (color, what) in enumerate(legend):
        parts += [box(80 + index * 200, 205, 16, 14, color, what), words(102 + index * 200, 217, what, anchor="start")]
    return "".join([*parts, "</svg>\n"])


PICTURES = {"layout.svg": layout, "step.svg": step}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
