"""Flask-SQLAlchemy: the session of the extension stages what a request changes.

flask --app flask_app run                                        the application
penstock run --app flask_app:pipeline --engine inline            streamer and consumers
"""

import os
from collections.abc import Sequence

from flask import Flask, Response, jsonify, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Log, Pipeline, Record

DATABASE_URL = os.environ.get("PENSTOCK_DATABASE_URL", "postgresql:///shop")


class Base(DeclarativeBase):
    """The base of the application's tables."""


class Post(Base):
    """A post."""

    __tablename__ = "posts"
    id: Mapped[int] = mapped_column(primary_key=True)
    author: Mapped[str]
    text: Mapped[str]


class Author(Base):
    """How much somebody has written."""

    __tablename__ = "authors"
    name: Mapped[str] = mapped_column(primary_key=True)
    posts: Mapped[int]


db = SQLAlchemy(model_class=Base)
posts = Log("posts")
pipeline = Pipeline([posts])
pipeline.stages(Post, to=posts, key="author")
pipeline.attach(db.session)


@pipeline.consumer(reads=posts)
def authors(session: Session, records: Sequence[Record]) -> None:
    """Counts posts; outside a request, so with the worker's session instead of ``db.session``."""
    for record in records:
        if record.action == "insert":
            added = insert(Author).values(name=record.key, posts=1)
            session.execute(added.on_conflict_do_update(index_elements=[Author.name], set_={"posts": Author.posts + 1}))


def create_app() -> Flask:
    """The application, as Flask's own command finds it."""
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = DATABASE_URL.replace("postgresql:", "postgresql+psycopg:", 1)
    db.init_app(app)

    @app.post("/posts")
    def create_post() -> tuple[Response, int]:
        post = Post(author=request.form["author"], text=request.form["text"])
        db.session.add(post)
        db.session.commit()  # the post and its record, or neither
        return jsonify(id=post.id), 201

    return app
