"""Which names mean a secret: one definition, held against both kinds of names."""

from __future__ import annotations

import pytest

from bundle.redaction.secret_names import (
    is_secret,
    judge_secret_name,
    remove_secret_variables,
)

SECRET = """
    TOKEN HF_TOKEN GH_TOKEN GITHUB_TOKEN MY_TOKENS FOO_TOKEN HF_TOKEN_2 TOKEN_PROD GITHUB_TOKEN_PROD
    AWS_SESSION_TOKEN access_token OAUTH_TOKEN --hf-token SLURM_JWT JWT BEARER
    SECRET CLIENT_SECRET clientSecret WEBHOOK_SECRET AWS_SECRET_ACCESS_KEY
    PASSWORD DB_PASSWORD db_password PGPASSWORD DBPASSWORDPROD PASSWD MYSQL_PWD GPG_PASSPHRASE
    DB_OLD_PWD PASS MYPASS DB_PASS SMTP_PASS MY_PASS_2
    KEY key API_KEY WANDB_API_KEY API_KEY_PROD OPENAI_APIKEY --api-key AWS_ACCESS_KEY_ID SECRET_KEY
    SSH_PRIVATE_KEY AZURE_STORAGE_KEY ENCRYPTION_KEY
    CREDENTIAL GOOGLE_CREDENTIALS GOOGLE_APPLICATION_CREDENTIALS
    AUTH BASIC_AUTH AUTH_HEADER --auth Authorization
    COOKIE SESSION_COOKIE SESSION SESSION_ID SESSION_KEY
"""
PLAIN = """
    PATH PWD OLDPWD HOME SHELL LS_COLORS AUTHOR AUTHORITY SECRETARY KEYBOARD MONKEY HOTKEY
    TOKENIZERS_PARALLELISM --tokenizer MAX_TOKENS NUM_TOKENS PAD_TOKEN --eos-token --token-length
    HF_TOKEN_PATH HF_HUB_DISABLE_IMPLICIT_TOKEN tokens_per_batch
    PASSTHROUGH BYPASS COMPASS FORWARD_PASS GIT_ASKPASS SSH_ASKPASS PGPASSFILE
    PUBLIC_KEY PRIMARY_KEY COMET_EXPERIMENT_KEY KEYS_COUNT --num-keys
    SSH_AUTH_SOCK XAUTHORITY AUTH_TYPE --auth-method
    SESSION_MANAGER XDG_SESSION_ID XDG_SESSION_TYPE DBUS_SESSION_BUS_ADDRESS
    SLURM_JOB_ID SLURM_JOB_KEY OMPI_COMM_WORLD_RANK OMPI_MCA_btl PMIX_SECURITY_MODE NCCL_DEBUG
    PYTHONPATH KRB5CCNAME LM_LICENSE_FILE AWS_SHARED_CREDENTIALS_FILE --lr --epochs
"""


@pytest.mark.parametrize("name", SECRET.split())
def test_names_of_secrets(name: str) -> None:
    bare = name.lstrip("-")
    assert is_secret(bare)
    assert is_secret(bare.lower()) or not name.isupper()
    env = {"PATH": "/usr/bin", bare: "hush"}
    assert remove_secret_variables(env, ()) == {"PATH": "/usr/bin"}
    assert remove_secret_variables(env, ["OTHER"]) == {"PATH": "/usr/bin"}
    assert remove_secret_variables(env, [bare]) == env


@pytest.mark.parametrize("name", [*PLAIN.split(), "", "_", "\udcff", "\u00e4\u00f6", "9"])
def test_names_that_only_look_so(name: str) -> None:
    bare = name.lstrip("-")
    assert not is_secret(bare)
    assert remove_secret_variables({bare: "x"}, ()) == {bare: "x"}


def test_what_a_text_says_counts_as_a_variable_too() -> None:
    """No name is a secret in a log and none in the environment, but for those of every shell."""
    for name in (*SECRET.split(), *PLAIN.split()):
        if judge_secret_name(name.encode()) is not None:
            assert is_secret(name) or name in ("PWD", "XDG_SESSION_ID")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("HF_TOKEN", "token"), ("hfToken", "token"), ("X-Auth-Token", "token"),
        ("API_KEY", "api-key"),
        ("OPENAI_API_KEY_1", "api-key"), ("apiKey", "api-key"), ("db.password", "password"),
        ("PGPASSWORD", "password"), ("SMTP_PASS", "password"), ("clientSecret", "secret"),
        ("aws_secret_access_key", "key"), ("ssh_private_key", "private-key"), ("Cookie", "cookie"),
        ("AUTHORIZATION", "authorization"), ("session_key", "session-key"), ("SLURM_JWT", "token"),
        ("GITHUB_PAT", "token"), ("munge_key", "key"), ("credentials", "credential"),
    ],
)  # fmt: skip
def test_names_that_mean_a_secret_in_a_text(name: str, kind: str) -> None:
    found = judge_secret_name(name.encode())
    assert found is not None
    assert (found.kind, found.sure) == (kind, True)
