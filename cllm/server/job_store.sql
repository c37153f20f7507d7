CREATE TABLE IF NOT EXISTS objects(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    expires REAL, active INTEGER NOT NULL, size INTEGER NOT NULL, record BLOB NOT NULL, more BLOB NOT NULL,
    previous TEXT);
CREATE INDEX IF NOT EXISTS objects_of_tenant ON objects(tenant, kind, created);
CREATE INDEX IF NOT EXISTS objects_that_expire ON objects(expires) WHERE expires IS NOT NULL;
CREATE TABLE IF NOT EXISTS lines(
    batch TEXT NOT NULL, number INTEGER NOT NULL, opening BLOB NOT NULL, begin INTEGER NOT NULL,
    size INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, tokens INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(batch, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lines_in_order ON lines(batch, state, opening, number);
CREATE TABLE IF NOT EXISTS answers(
    batch TEXT NOT NULL, number INTEGER NOT NULL, answer BLOB NOT NULL, PRIMARY KEY(batch, number));
