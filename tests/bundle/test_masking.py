"""Arguments and texts as they may be kept and shown: without secrets, else as they were."""

from __future__ import annotations

import pytest

from bundle.masking import masked, without_url_secrets


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--export=ALL,HF_TOKEN=hf_abc,MINE=1", "--export=ALL,HF_TOKEN=***,MINE=1"),
        ("--export=HF_TOKEN=abc=,B=2", "--export=HF_TOKEN=***,B=2"),
        ("WANDB_API_KEY=abc", "WANDB_API_KEY=***"),
        ("KEY=abc", "KEY=***"),
        ("MYPASS=abc", "MYPASS=***"),
        ("--db-password=abc", "--db-password=***"),
        ("--password=a,b c=d", "--password=***"),
        ("+model.api_key=abc", "+model.api_key=***"),
        ('{"api_key": "abc", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        ("Authorization: Bearer abc", "Authorization: ***"),
        ("curl --token abc -o x", "curl --token *** -o x"),
        ("http://u:SECRET@h/x", "http://h/x"),
        ("--data=https://u:p/w@h:1/x?token=abc", "--data=https://h:1/x?token=***"),
        ("--tokenizer=bert", "--tokenizer=bert"),
        ("--eos-token=<s>", "--eos-token=<s>"),
        ("nvcr.io/key:24.01", "nvcr.io/key:24.01"),
        ("train.py", "train.py"),
        ("", ""),
    ],
)
def test_a_secret_in_an_argument(word: str, shown: str) -> None:
    assert masked(["cmd", word]) == ["cmd", shown]
    assert masked(masked(["cmd", word])) == ["cmd", shown]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("--token abc --token", "--token *** --token"),
        ("--api-key VALUE x", "--api-key *** x"),
        ("--password -x", "--password ***"),
        ("--use-auth-token --epochs 3", "--use-auth-token --epochs 3"),
        ("-token abc", "-token ***"),
        ("--tokenizer bert", "--tokenizer bert"),
        ("--max-tokens 5", "--max-tokens 5"),
    ],
)
def test_a_secret_after_its_option(argv: str, shown: str) -> None:
    assert masked(["t.py", *argv.split()]) == ["t.py", *shown.split()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "see https://u:p@h/x, http://t@h/y, mail a@b.c",
            "see https://h/x, http://h/y, mail a@b.c",
        ),
        ("at https://u:p@ss@h.example/x", "at https://h.example/x"),
        ("at https://u:a/b@h.example/x", "at https://h.example/x"),
        ("'https://h/x.whl?token=abc'", "'https://h/x.whl?token=***'"),
        ("https://h/x?a=1&sig=b%3D#sha256=0", "https://h/x?a=***&sig=***#sha256=0"),
        ("https://h/x?abc", "https://h/x?***"),
        ("https://h/x#access_token=abc&x=1", "https://h/x#access_token=***&x=1"),
        ("git+https://h/x.git@v1.2", "git+https://h/x.git@v1.2"),
        ("http://h:8080/a@b http://[::1]:80/a@b", "http://h:8080/a@b http://[::1]:80/a@b"),
        ("file:///srv/a@b.whl", "file:///srv/a@b.whl"),
        ("no address: // here", "no address: // here"),
    ],
)
def test_a_url_without_its_credentials(text: str, shown: str) -> None:
    assert without_url_secrets(text) == shown
    assert without_url_secrets(shown) == shown
