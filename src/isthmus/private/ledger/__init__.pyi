from isthmus.private.ledger.ahead import Ahead as Ahead
from isthmus.private.ledger.book import Ledger as Ledger
from isthmus.private.ledger.book import fingerprint as fingerprint
from isthmus.private.ledger.budget import Budget as Budget
from isthmus.private.ledger.reading import LedgerAccount as LedgerAccount
from isthmus.private.ledger.schema import KINDS as KINDS
from isthmus.private.ledger.schema import NO_GUARANTEE as NO_GUARANTEE
from isthmus.private.ledger.tally import lost as lost
