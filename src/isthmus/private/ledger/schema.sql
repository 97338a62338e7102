-- The tables of a ledger, step by step; a file counts the steps it has seen.

-- step 1
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- `current` is its newest version
CREATE TABLE document (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, current INTEGER);
-- `name` is the noise nonce in hexadecimal, `content` a digest that shows whether the document changed
CREATE TABLE version (
    id INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES document,
    name TEXT NOT NULL UNIQUE,
    content BLOB
);
CREATE INDEX version_of ON version (document);
CREATE TABLE peer (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
-- the name of a noise, with all that its cost says: another ε is another release
CREATE TABLE release (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    mechanism TEXT NOT NULL,
    fields TEXT NOT NULL,
    epsilon REAL NOT NULL,
    sensitivity REAL NOT NULL,
    scale REAL NOT NULL,
    shared INTEGER NOT NULL,
    halves INTEGER NOT NULL,
    adjacency TEXT NOT NULL,
    UNIQUE (name, mechanism, fields, epsilon, sensitivity, scale, shared, halves, adjacency)
);
-- something left: a charged release, or anything else with its ε, null meaning no DP guarantee
CREATE TABLE departure (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    peer INTEGER NOT NULL REFERENCES peer,
    release INTEGER REFERENCES release,
    items INTEGER NOT NULL,
    charged INTEGER NOT NULL,
    epsilon REAL,
    unit TEXT NOT NULL,
    note TEXT NOT NULL
);
-- a version's noise was shown to a peer; ordered so that a batch lands on neighbouring pages
CREATE TABLE charge (
    release INTEGER NOT NULL REFERENCES release,
    version INTEGER NOT NULL REFERENCES version,
    peer INTEGER NOT NULL REFERENCES peer,
    departure INTEGER NOT NULL REFERENCES departure,
    PRIMARY KEY (release, version, peer)
) WITHOUT ROWID;
-- running sums, so that a charge looks at a few rows however long the history is
CREATE TABLE spent (
    document INTEGER NOT NULL REFERENCES document,
    peer INTEGER NOT NULL,
    field TEXT NOT NULL,
    epsilon REAL NOT NULL,
    square REAL NOT NULL,
    rho REAL NOT NULL,
    PRIMARY KEY (document, peer, field)
) WITHOUT ROWID;

-- step 2
-- whose budget a document spends that had another name before; null means its own
ALTER TABLE document ADD COLUMN lineage INTEGER REFERENCES document;
CREATE INDEX document_lineage ON document (lineage) WHERE lineage IS NOT NULL;
-- `text` is a digest of the words alone; `origin` the document that had them first, if another
ALTER TABLE version ADD COLUMN text BLOB;
ALTER TABLE version ADD COLUMN origin INTEGER REFERENCES document;
CREATE INDEX version_text ON version (text);
CREATE INDEX version_content ON version (content) WHERE text IS NULL;
-- who pays for a version: the document's lineage, and that of whoever had the text first
CREATE VIEW payer AS
    SELECT v.id AS version, coalesce(d.lineage, d.id) AS document
    FROM version v JOIN document d ON d.id = v.document
    UNION SELECT v.id, coalesce(d.lineage, d.id)
    FROM version v JOIN document d ON d.id = v.origin;

-- step 3
-- every change in order, as JSON, with a hash over it and the hash before it
CREATE TABLE link (number INTEGER PRIMARY KEY, event TEXT NOT NULL, hash TEXT NOT NULL);

-- step 4
-- whom documents are about: a patient, a customer, by a keyed digest; what is said once stays
CREATE TABLE subject (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE belongs (
    document INTEGER NOT NULL REFERENCES document,
    subject INTEGER NOT NULL REFERENCES subject,
    PRIMARY KEY (document, subject)
) WITHOUT ROWID;
CREATE INDEX belongs_to ON belongs (subject);
