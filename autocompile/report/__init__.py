"""Records into words: the document, the Markdown report, the terminal's tables and the verdict in one sentence."""

from __future__ import annotations

from autocompile.report.study import Study

__all__ = ["Study"]
