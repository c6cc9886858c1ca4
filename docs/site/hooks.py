"""What mkdocs adds to the pages of this folder: pages that lie elsewhere, every command's help, links that lead out.

Beside the site, which is the folder of one version, it writes a list of the versions and a page that opens the newest.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from packaging.version import InvalidVersion, Version
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "examples.md": "examples/README.md",
}
"""Pages of the site that are files outside of docs/."""
WIDTH = 88
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Say at the foot of each page which version it describes. From a disk, that is the only place that says so."""
    from fullshard import __version__

    config.copyright = f"{config.site_name} {__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in ELSEWHERE.items()}
    for page, text in {**pages, "cli.md": commands(), "decisions/index.md": decisions()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Keep a page from asking the repository's host for numbers: nothing is fetched from elsewhere."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """Do the same for the page of a missing address."""
    return output.replace(' data-md-component="source"', "")


def on_post_build(*, config: Any) -> None:
    """List the versions beside this one, for the menu of versions, and open the newest from the folder above."""
    folder = Path(config.site_dir)
    if not is_version(folder.name):
        return  # `mkdocs serve`, and a folder that was asked for
    names = [path.parent.name for path in folder.parent.glob("*/index.html")]
    versions = sorted(filter(is_version, names), key=Version, reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in versions]
    (folder.parent / "versions.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    links = "\n".join(f'<p><a href="{name}/index.html">{config.site_name} {name}</a></p>' for name in versions)
    page = (
        f'<!doctype html>\n<meta charset="utf-8">\n<title>{config.site_name}</title>\n'
        f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n{links}\n'
    )
    (folder.parent / "index.html").write_text(page, encoding="utf-8")


def is_version(name: str) -> bool:
    """Return whether a folder is named after a version."""
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site, or to the repository for what the site lacks."""
    uri = page.file.src_uri
    folder = posixpath.dirname(ELSEWHERE.get(uri, f"docs/{uri}"))

    def link(found: re.Match[str]) -> str:
        return found[1] + resolve(found[2], folder, uri, config.repo_url, files) + found[3]

    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(link, part) for index, part in enumerate(parts))


def resolve(target: str, folder: str, uri: str, repository: str, files: Files) -> str:
    """A link for the page `uri` of the site, from one that holds for a file in this folder of the repository."""
    base = f"{repository}/blob/main/"
    for start in (base, f"{repository}/raw/main/"):
        if target.startswith(start):
            target, folder = target.removeprefix(start), ""
    if target.startswith("#") or re.match(r"\w+:", target):
        return target
    path, hash_, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    pages = {source: name for name, source in ELSEWHERE.items()}
    pages["docs/decisions"] = "decisions/index.md"
    name = pages.get(path, path.removeprefix("docs/"))
    is_here = path in pages or (path.startswith("docs/") and files.get_file_from_path(name) is not None)
    if is_here:
        return posixpath.relpath(name, posixpath.dirname(uri) or ".") + hash_ + anchor
    if not (ROOT / path).exists():
        return target  # which mkdocs will find to be wrong
    return base + path + hash_ + anchor


def decisions() -> str:
    """A list of the decisions by their titles."""
    lines = ["# Decisions", "", "What was not obvious, and why it was decided so.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"* [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The help of every command, as it is printed."""
    from fullshard.cli.main import COMMANDS, app, load_command

    os.environ["COLUMNS"], os.environ["NO_COLOR"] = str(WIDTH), "1"
    lines = ["# Command line", "", _help(app, []), ""]
    for name in COMMANDS:
        lines += [f"## fullshard {name}", "", _help(app, [name]), ""]
        for inner in getattr(load_command(name), "commands", {}):
            lines += [f"### fullshard {name} {inner}", "", _help(app, [name, inner]), ""]
    return "\n".join(lines)


def _help(app: typer.Typer, words: list[str]) -> str:
    flag = "--help_all" if words == ["launch"] else "--help"
    result = CliRunner().invoke(app, [*words, flag], prog_name="fullshard", terminal_width=WIDTH)
    if result.exit_code:
        raise RuntimeError(f"fullshard {' '.join(words)} {flag}: {result.output}")
    return f"```text\n{result.output.strip()}\n```"
