"""The former place of `fullshard.core.files`, kept for code that imports it from here."""

from fullshard.core.files import whole_file as whole_file
from fullshard.core.files import write_text as write_text
