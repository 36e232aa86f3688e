"""The story of a record, and why it is not further than one expects.

story     a story, and an explanation, as values; read from Postgres and Redis
causes    the first cause that holds
"""
