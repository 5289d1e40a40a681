"""The imported package: its names, its version, and its requirements."""

from __future__ import annotations

import subprocess
import sys

import pytest

import effuse


def test_importing_it_is_cheap_and_clients_need_no_torch() -> None:
    code = (
        "import sys, effuse; assert 'grpc' not in sys.modules;"
        "effuse.Client('127.0.0.1:1'); effuse.Params();"
        "found = {'torch', 'numpy', 'transformers'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_its_face_is_listed_with_its_version_and_nothing_is_imported() -> None:
    code = (
        "import sys, effuse; from importlib.metadata import version;"
        "assert {*effuse.__all__, '__version__'} <= {*dir(effuse)};"
        "assert effuse.__version__ == version('effuse'); assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_every_name_of_its_face_is_there() -> None:
    for name in effuse.__all__:
        assert vars(getattr(effuse, name))["__module__"].startswith("effuse."), name
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        getattr(effuse, "nothing_of_this_name")  # noqa: B009
