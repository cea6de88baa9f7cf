"""`python -m words [PATH ...]`: prints sentences that are not plain English, with what to write instead.

    PYTHONPATH=tests python -m words [PATH ...]

Without paths it reads what `banned.toml` lists as clean, as `make lint` does. It exits with 1 if it prints a sentence.
"""

from __future__ import annotations

import sys
from os.path import relpath
from pathlib import Path

from words.banned import ROOT, clean_files, files_in, findings, read_list


def main(paths: list[str]) -> int:
    words = read_list()
    files = [file for path in paths for file in files_in(Path(path).resolve())] or clean_files(words)
    found = [finding for file in files for finding in findings(file, words.patterns)]
    for finding in found:
        print(f"{relpath(finding.file, ROOT)}:{finding.line}: {finding.sentence}")
        print(f"    {finding.words!r}: write {finding.pattern.instead}. {finding.pattern.why}")
    print(f"{len(files)} files, {len(found)} sentences to rewrite")
    return 1 if found else 0


sys.exit(main(sys.argv[1:]))
