"""The former place of what is in `cost`: its deprecated name is read from here until the next release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.facade import former_names
from isthmus.private.cost import PrivacyLoss as PrivacyLoss

if not TYPE_CHECKING:
    __getattr__ = former_names(__name__, {"Loss": "PrivacyLoss"})
