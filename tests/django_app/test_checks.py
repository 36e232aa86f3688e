"""``manage.py check`` names what the rules for models do not see."""

from typing import Any

import pytest

from django_app.conftest import ACCOUNTS
from penstock.django import DjangoPipeline
from penstock.schema.capture import install_triggers
from penstock.testing import staged


def find_model(name: str) -> Any:
    """A model of the app, or of a field's table: ``Account.tags``."""
    from django.apps import apps  # noqa: PLC0415  after the settings

    name, _, field = name.partition(".")
    model: Any = apps.get_model("accounts", name)
    return getattr(model, field).through if field else model


def check() -> list[tuple[str, str]]:
    from penstock.django.apps import check_pipeline  # noqa: PLC0415  after the settings

    return [(message.id or "", str(message.hint)) for message in check_pipeline()]


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (["Account"], ["Account.tags.through", "Account.friends.through", "Account.teams.through"]),
        (["Veiled"], ["Account.tags.through", "Account.friends.through", "Account.teams.through"]),
        (["Tag"], ["Account.tags.through"]),
        (["Account", "Tag"], ["Account.tags.through", "Account.friends.through", "Account.teams.through"]),
        (["Team"], ["Account.teams.through"]),
        (["Account", "Account.tags", "Account.friends"], ["Account.teams.through"]),
        (["Account", "Account.tags", "Account.friends", "Membership"], []),
        (["Membership"], []),
        (["Account.tags"], []),
    ],
)
def test_many_to_many_fields_of_models_with_rules_are_named_unless_a_rule_is_for_their_table(
    rules: list[str], names: list[str], pipeline: DjangoPipeline
) -> None:
    """Guarantee 7."""
    for rule in rules:
        pipeline.stages(find_model(rule), to=ACCOUNTS, key="id")

    found = check()

    assert sorted(found) == sorted(
        ("penstock.W001", f"Declare a rule for {name}; or add penstock.W001 to SILENCED_SYSTEM_CHECKS.")
        for name in names
    )


def test_a_rule_for_a_through_model_stages_what_the_manager_does(
    db: Any, pipeline: DjangoPipeline, database_url: str
) -> None:
    """Guarantee 7: ``add``, ``set``, ``remove`` and ``clear``, from either side."""
    Account, Tag = find_model("Account"), find_model("Tag")  # noqa: N806  classes
    pipeline.stages(Account.tags.through, to=ACCOUNTS, key="account_id", data=["tag_id"])
    with db.connection.schema_editor() as editor:
        for name in ("Tag", "Team", "Account", "Membership"):
            editor.create_model(find_model(name))
    install_triggers(database_url, pipeline)
    account, (first, second) = Account.objects.create(), [Tag.objects.create() for _ in range(2)]

    account.tags.add(first)
    account.tags.set([second])
    second.account_set.remove(account)
    second.account_set.add(account)
    account.tags.clear()

    with db.transaction.atomic():
        assert [(r.key, r.action, r.data["tag_id"]) for r in staged(db.connection)] == [
            ("1", "insert", 1),
            ("1", "delete", 1),
            ("1", "insert", 2),
            ("1", "delete", 2),
            ("1", "insert", 2),
            ("1", "delete", 2),
        ]


class ToSecond:
    """Routes one app to another database."""

    def db_for_write(self, model: Any, **_: object) -> str | None:
        return "second" if model._meta.app_label == "accounts" else None


def test_a_model_of_another_database_is_an_error(pipeline: DjangoPipeline) -> None:
    """Guarantee 7: no trigger is there, and no table of Penstock's."""
    from django.test import override_settings  # noqa: PLC0415  after the settings

    pipeline.stages(find_model("Membership"), to=ACCOUNTS, key="id")
    assert check() == []
    with override_settings(DATABASE_ROUTERS=[ToSecond()]):
        assert check() == [("penstock.E002", "Declare the rule in a DjangoPipeline(…, using='second').")]
