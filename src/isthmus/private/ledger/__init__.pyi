from isthmus.private.ledger.accounts import Budget as Budget
from isthmus.private.ledger.accounts import LedgerAccount as LedgerAccount
from isthmus.private.ledger.book import Ahead as Ahead
from isthmus.private.ledger.book import Ledger as Ledger
from isthmus.private.ledger.book import fingerprint as fingerprint
from isthmus.private.ledger.store import KINDS as KINDS
from isthmus.private.ledger.store import NO_GUARANTEE as NO_GUARANTEE
from isthmus.private.ledger.store import lost as lost
