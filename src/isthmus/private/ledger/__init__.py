"""The ledger: what left a silo, what it cost, and what may still leave."""

from isthmus.private.ledger.ahead import Ahead
from isthmus.private.ledger.book import Ledger, fingerprint
from isthmus.private.ledger.budget import Budget
from isthmus.private.ledger.reading import Account
from isthmus.private.ledger.schema import KINDS, NO_GUARANTEE
from isthmus.private.ledger.tally import lost

__all__ = ["KINDS", "NO_GUARANTEE", "Account", "Ahead", "Budget", "Ledger", "fingerprint", "lost"]
