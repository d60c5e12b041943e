"""The package's public names, which load on first use."""

from __future__ import annotations

import pytest

import lightning_accelpact


@pytest.mark.parametrize("name", lightning_accelpact.__all__)
def test_public_name_loads_and_is_listed(name: str) -> None:
    assert getattr(lightning_accelpact, name).__name__ == name
    assert name in dir(lightning_accelpact)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_accelpact' has no attribute 'Nothing'"):
        lightning_accelpact.Nothing  # noqa: B018
