"""The application of README and of the how-tos: rides, and what follows from each of them.

``shop.events`` declares its pipeline, ``shop.models`` its tables.  To see it run, in this directory's parent:

    penstock run --app shop.events:pipeline --engine inline     starts a Postgres and a Valkey in .penstock
    python -m shop                                              in another terminal: books, changes and cancels rides
    penstock status --app shop.events:pipeline
"""

import os

from shop.events import pipeline

__all__ = ["DATABASE_URL", "REDIS_URL", "pipeline"]

DATABASE_URL = os.environ.get("PENSTOCK_DATABASE_URL", "")
REDIS_URL = os.environ.get("PENSTOCK_REDIS_URL", "")
