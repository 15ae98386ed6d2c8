"""Whether a request's body shows an image: its part's type, and nothing that somebody only writes about."""

from __future__ import annotations

import json

import pytest

from sidecar.capabilities.observed import has_image_part


@pytest.mark.parametrize(
    ("content", "has_image"),
    [
        (
            [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
            True,
        ),
        ([{"type": "input_image", "image_url": "data:image/png;base64,AA"}], True),
        ("hi", False),
        ("an image_url is what I would like to see", False),
        ('{"type": "image_url"} is how a part begins', False),
        ([{"type": "text", "text": "data:image/png;base64,AA_"}], False),
        ([{"type": "image"}], False),
        ("A" * 300_000, False),
        ("", False),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_only_a_part_of_such_a_type_is_an_image(content: object, has_image: bool, indent: int | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": content}]}, indent=indent).encode()

    assert has_image_part(body) is has_image
