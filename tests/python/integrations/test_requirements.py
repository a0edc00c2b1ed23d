"""What the integration needs is checked when it is imported, and named when it is not there."""

from __future__ import annotations

import tiny_glm  # noqa: F401

# isort: split
import subprocess
import sys
import textwrap

import pytest

from sparse_kvcm.integrations.transformers._requirements import check_version


@pytest.mark.parametrize("version", ["5.17.0", "5.9", "4.57.1"])
def test_older_transformers_are_refused_by_version(version):
    with pytest.raises(ImportError, match=f"transformers >= 5.18, got {version}"):
        check_version(version)


@pytest.mark.parametrize("version", ["5.18.0", "5.24.0.dev0", "6.0"])
def test_newer_transformers_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_is_named_with_the_extra(missing):
    program = f"""
        import sys
        sys.modules[{missing!r}] = None
        import sparse_kvcm, sparse_kvcm.integrations
        assert "torch" not in sys.modules or {missing!r} == "torch"
        try:
            import sparse_kvcm.integrations.transformers
        except ImportError as error:
            assert "needs {missing}" in str(error), error
            assert "pip install 'sparse_kvcm[transformers]'" in str(error), error
        else:
            raise SystemExit("imported")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
