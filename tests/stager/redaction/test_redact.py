"""Taking secrets out of texts: what goes, what stays, and that no text makes it slow or fail."""

from __future__ import annotations

import base64
import json
import random
import re
import urllib.parse
from collections.abc import Iterator
from functools import partial

import pytest

from bundle.redaction.known_values import KnownValues
from stager.redaction import redactor
from stager.redaction.redactor import BLOCK, HELD, LONGEST, Pseudonyms, Redactor, read_views
from tests.support.counting import calls

SHORT, LONG = "hunter2x", "aB3dE5fG7hI9jK1lM2nO"
FORMS = r"""
HF_TOKEN={}
export KEY='{}'
{{"KEY": "{}"}}
HF_TOKEN={} python train.py
export DB_PASSWORD='two words {}'
DB_PASSWORD=two words {}
declare -x HF_TOKEN="{}"
declare -x DB_PASS="first⏎{}"⏎declare -x HOME="/h"
export DB_PASSWORD='first⏎⏎x{}⏎last'
+ export HF_TOKEN=$'{}\t'
$env:HF_TOKEN = "{}"
set HF_TOKEN={}
setenv HF_TOKEN {}
ENV HF_TOKEN {}
docker run -e HF_TOKEN={} image
srun --export=ALL,HF_TOKEN={} python
sbatch --export=HF_TOKEN={},FOO=1 job.sh
apptainer exec --env HF_TOKEN={} image
PGPASSWORD={} psql -h x
GITHUBTOKEN={}
hftoken={}
encryptionkey: {}
X-SLURM-USER-TOKEN: {}
TF_VAR_db_password={}
ansible_become_pass: {}
fernet_key={}
aws_secret_access_key = {}
[server]⏎password: {}
password = “{}”
password: '''{}'''
hf_token: !secret {}
hf_token: &anchor {}
password: |⏎  {}
"password": |⏎  {}
api_keys:⏎  - {}⏎  - other
- name: HF_TOKEN⏎  value: "{}"
{{"name": "HF_TOKEN", "value": "{}"}}
{{"key":"HF_TOKEN","value":"{}"}}
{{"token":"{}"}}
{{"token":⏎ "{}"}}
{{"password" : "{}"}}
{{"passwords": ["{}", "other"]}}
{{"credentials": {{"user": "alice", "pw": "{}"}}}}
{{\"password\": \"{}\"}}
{{\\\"password\\\": \\\"{}\\\"}}
{{\u0022password\u0022: \u0022{}\u0022}}
["api_key:", "  x{}1y"]
&quot;password&quot;:&quot;{}&quot;
{{'api_key': b'{}'}}
{{token:{}}}
[('x-api-key', '{}')]
(b'x-api-key', b'{}')
('HF_TOKEN', '{}')
os.environ["HF_TOKEN"] = "{}"
os.environ.setdefault('HF_TOKEN', '{}')
environ({{'PATH': '/bin', 'HF_TOKEN': '{}'}})
Namespace(token='{}', lr=0.1)
def login(token: str = '{}'):
def login(token: Optional[str] = '{}'):
credentials=('alice', '{}')
auth=HTTPBasicAuth('alice', '{}')
SecretStr('{}')
wandb.login(key='{}')
--hf-token {}
--password '{}'
python t.py --token \⏎  {} --epochs 3
["t.py","--token","{}"]
"--password",⏎ "{}"
['--password', '{}']
["--password=x{}"]
argv: --token⏎{}⏎--epochs
--token\0{}\0--epochs
Authorization: Bearer {}
> Authorization: token {}
Proxy-Authorization: Basic {}
curl -H "Authorization: token {}" https://h
curl -H 'X-Api-Key: two words {}' https://h
git -c http.extraheader="AUTHORIZATION: bearer {}" clone
send: b'GET / HTTP/1.1\\r\\nAuthorization: Bearer {}\\r\\n'
Cookie: theme=dark; session={}
Set-Cookie: session={}; Path=/
{{'cookie': 'a=b; c={}'}}
GET /api?api_key={}&x=1
https://h/p?x=1&token={}
?X-Amz-Signature={}&x
?sv=2020&sig={}
?key={}
#access_token={}&x=1
password%3D{}
%22password%22%3A%22{}%22
https://user:{}@host/simple
https%3A%2F%2Fuser%3A{}%40host%2Fsimple
https://user:with/slash/{}@host/simple
https:\\/\\/user:{}@host
git+https://oauth2:{}@gitlab.example/x.git
mysql://root:{}@db/x
redis://:{}@h:6379/0
ssh alice:{}@host.example.org
jdbc:postgresql://h/db?user=u&password={}
Server=x;User Id=sa;Password={};Database=y
AccountName=x;AccountKey={};EndpointSuffix=core
psql "host=x password={}"
//registry.example.org/:_authToken={}
machine x login y password {}
machine x⏎  login y⏎  password {}
curl -u alice:{} https://x
sshpass -p {} ssh x
docker login -u a -p {} registry
echo {} | docker login --password-stdin
kinit alice <<< {}
ldapsearch -x -w {} -D cn=x
openssl -passin pass:{}
--from-literal=password={}
| password | {} |
│ password │ {} │
│ token = │⏎│ 'x{}1y' │
password -> {}
password   {}
password\t{}
password is {}
the secret is '{}'
password for alice: {}
Enter password: {}
API key: {}
Incorrect API key provided: {}.
access token: {}
<password>{}</password>
<property name="password">{}</property>
<add key="ApiKey" value="{}" />
\x1b[32mHF_TOKEN\x1b[0m=\x1b[1m{}\x1b[0m
密码 password\uff1a{}
HF_TOKEN\u00a0=\u00a0{}
PASSWORD {}
mot_de_passe: {}
HF_TOKEN="abc"'x{}'
HF_TOKEN='abc'{}
<password><![CDATA[{}]]></password>
<token>⏎  {}1y⏎</token>
db.example.org:5432:*:alice:{}
{{"name":"HF_TOKEN","type":"secret","value":"{}"}}
{{"value": "{}", "name": "HF_TOKEN"}}
{{"Env": ["HF_TOKEN={}", "PATH=/bin"]}}
{{"headers": [["authorization", "Bearer {}"]]}}
HF_TOKEN          : {}
\x1b[32mHF_TOKEN\x1b[0m: '\x1b[1m{}\x1b[0m'
"""
"""How a secret is written, each with its place; an arrow ends a line."""


def forms() -> list[str]:
    quotes = '"' * 3
    made = FORMS.strip("\n").replace("\u201c", quotes).replace("\u201d", quotes)
    for sign, meant in {
        r"\uff1a": "\uff1a",
        r"\u00a0": "\u00a0",
        r"\0": "\0",
        r"\x1b": "\x1b",
    }.items():
        made = made.replace(sign, meant)
    return [line.replace("\u23ce", "\n") for line in made.split("\n")]


@pytest.mark.parametrize(
    "line",
    [
        "docker login -u me -p 'pq7x1 rz8w2 tv9y3' registry.example",
        'podman login -p "pq7x1 rz8w2 tv9y3" registry.example && ls',
        "apptainer registry login -u me -p 'pq7x1 rz8w2 tv9y3' oras://r",
        "curl -u 'me:pq7x1 rz8w2 tv9y3' https://h",
        'wget --user="me:pq7x1 rz8w2 tv9y3" https://h',
        "curl -H 'Authorization: Bearer pq7x1 rz8w2 tv9y3' https://h",
        'export TOKEN="pq7x1 rz8w2 tv9y3"; python t.py',
    ],
)
def test_no_piece_of_a_quoted_secret_stays(line: str) -> None:
    shown = Redactor().words(f"before\n{line}\nbehind")
    assert [piece for piece in ("pq7x1", "rz8w2", "tv9y3") if piece in shown] == []
    assert shown.startswith("before\n" + line.partition(" ")[0])
    assert shown.endswith("\nbehind")


@pytest.mark.parametrize("depth", range(7))
def test_a_secret_goes_however_often_its_text_is_escaped(depth: int) -> None:
    text = 'python t.py --token \\\r\n  hunter2x --epochs 3; echo {"password": "hunter3x"}'
    for _ in range(depth):
        text = json.dumps(text)
    assert "hunter" not in Redactor().words(text)


@pytest.mark.parametrize("secret", [SHORT, LONG])
@pytest.mark.parametrize("form", forms())
def test_a_secret_goes_in_whatever_form_it_is(form: str, secret: str) -> None:
    alone = form.format(secret)
    for text in (alone, f"before\n{alone}\nbehind"):
        redactor = Redactor()
        shown = redactor.words(text)
        assert secret not in shown
        assert "[redacted: " in shown
        assert redactor.counts
        assert shown.count("\n") == text.count("\n")
        assert Redactor().words(shown) == shown  # and what is left has none
    assert shown.startswith("before\n")
    assert shown.endswith("behind")


TOKENS = """
hf_qWcXvBnMlKjHgFdSaPoIuYtReW12345678 ghp_16C7e42F292c6912E7710c838347Ae178B4a
gho_16C7e42F292c6912E7710c838347Ae178B4a
github_pat_11ABCDEFG0abcdefghijkl_1234567890abcdefghijklmnopqrstuvwxyz glpat-XyZ12345abcdeFGHIJkl
xoxb-123456789012-abcdefABCDEF xoxp-123456789012-abcdefABCDEF sk-abcDEF123456ghiJKL789012
sk-proj-abcDEF123456ghiJKL789012 sk_live_abcDEF123456ghiJKL789012 AKIAIOSFODNN7EXAMPLE
AIzaSyA1234567890abcdefghijklmnopqrstuv
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSIsImlhdCI6MTV9.c2lnbmF0dXJlLW9mLWl0
pypi-AgEIcHlwaS5vcmcCJDU2MTdjZWVhLTU0YmItNDU npm_1234567890abcdefABCDEF1234567890abcd
MUNGE:AwQFAABbK8mVx9QzNfT2LpR7sYcE4uWj: $6$saltsalt$abcdefghijklmnopqrstuvwxyz0123456789
dapi1234567890abcdef1234567890abcdef hvs.CAESIJ1234567890abcdefghijklmno
AGE-SECRET-KEY-1QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ
"""
"""Tokens of known services."""


def test_a_token_of_hexadecimal_digits_goes_where_it_is_a_login() -> None:
    token = "0123456789abcdef" * 3
    shown = Redactor().words(f"Cloning https://{token}@git.corp/x.git at {token}")
    assert shown.startswith("Cloning https://[redacted: url-credential]@git.corp/x.git")


@pytest.mark.parametrize("token", TOKENS.split())
@pytest.mark.parametrize(
    "around", ["{}", "it is {}, yes", '["{}"]', "https://h/{}/x", "\x1b[1m{}\x1b[0m"]
)
def test_a_token_is_known_by_its_looks(token: str, around: str) -> None:
    shown = Redactor().words(around.format(token))
    assert token[len(token) // 2 :].strip(":") not in shown
    assert re.search(r"\[redacted: [\w-]+\]", shown)


BENIGN = """\
tokens/s 1234 tokens_per_second=33.2 throughput: 5 tokens
TOKENIZERS_PARALLELISM=false max_tokens=512 num_tokens: 5 total_tokens=1e9 "tokens": 5
"pad_token": "[PAD]", "eos_token_id": 2, "bos_token": "<s>", "token_type_ids": [0, 0]
special_tokens_map={'unk_token': '[UNK]', 'mask_token': '[MASK]'} token='[CLS]'
token 5 of 100: 'the'  next token: hello  first token latency: 12 ms  token: 5
tokenizer_config.json: 100%|##########| 48.0/48.0 [00:00<00:00, 300kB/s]
Token indices sequence length is longer than the maximum for this model (1024 > 512).
Missing key(s) in state_dict: "bert.pooler.dense.weight". Unexpected key(s): "cls.bias".
KeyError: 'token'
JSONDecodeError: Unexpected token '<' in JSON at position 0
SyntaxError: unexpected token: else
key_padding_mask=None, past_key_values=None, num_key_value_heads=8, k_proj.weight key.weight: 1
sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
{"name": "tokenizers", "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}
commit 3f786850e387550fdab836ed7e6dc881de23001b
AuthType=auth/munge  CredType=cred/munge AuthInfo=socket=/run/munge/munge.socket.2
srun: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"
forward pass: 3.5 ms, backward_pass=12ms, passed 5 of 6 tests, bypass=true
bypass: full SSH_AUTH_SOCK=/tmp/ssh-x/agent.1 PWD=/home/x KEY   VALUE   DESCRIPTION  KEY: 5
    token = get_token()
    headers = build_hf_headers(token=token, library_name=library_name)
    def __init__(self, token: Optional[str] = None, password=None):
    tok = AutoTokenizer.from_pretrained(name, token=args.token, use_auth_token=True)
pass a token by logging in with `huggingface-cli login` or by passing `token=<your_token>`.
usage: train.py [-h] [--token TOKEN] [--api-key API_KEY] [--password PASSWORD]
  --token TOKEN         the token to use
you can find your API key in your browser here: https://wandb.ai/authorize
wandb: Paste an API key from your profile and hit enter, or press ctrl+c to quit:
"pass_env": ["HF_TOKEN", "WANDB_API_KEY"]
https://download.pytorch.org/whl/cpu/torch-2.3.1%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256=9f86
git+https://github.com/x/y@v1.2 nvcr.io/nvidia/pytorch:24.01@sha256:9f86d081 git@github.com:x/y.git
tcp://10.0.0.1:29500 MASTER_ADDR=hpc07 MASTER_PORT=29500 rdzv_endpoint=hpc07:29500
{"v": 1, "bundle_id": "57febb1d59423273a49983cce154393b78cbcca87e13c7653353bb29bca9507e"}
session_parameters: none; sessions: 3; "signature": "forward(x)", exit code: 1, error code=5
Authorization failed; authentication required; password required; invalid credentials
mask-rcnn disk-usage-123456789012345678901234 risk-adjusted-1234567890abcdefgh
hf_hub_download hf_transfer hf_xet enabled; basic functionality; Basic training
password=None token=null api_key="" secret=*** password=$DB_PASSWORD token=${HF_TOKEN} key: value
[rank0]:[E1122 05:21:32.123456 4711 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught timeout
PATH=C:\\new\\table 50%25 &amp; caf\u00e9 \ud83d\ude00
"""


@pytest.mark.parametrize(
    "line", BENIGN.encode("utf-16", "surrogatepass").decode("utf-16").splitlines()
)
def test_ordinary_words_and_digests_stay(line: str) -> None:
    redactor = Redactor()
    assert redactor.words(line) == line
    assert not redactor.counts


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('{"password": 12345, "n": [1, 2], "api_keys": ["a1", "b2"], "m": 1}',
         '{"password": "[redacted: password]", "n": [1, 2], "api_keys": "[redacted: api-key]", '
         '"m": 1}'),
        ("f(token='abc1', lr=0.1)", "f(token='[redacted: token]', lr=0.1)"),
        ("(user=a, password=abc1)", "(user=a, password=[redacted: password])"),
        ("https://a:b@h:1/x", "https://[redacted: url-credential]@h:1/x"),
        # Halves of characters are survived.
        ("\ud83c token=abc1 \udcff", "\ud83c token=[redacted: token] \udcff"),
        ("token=abc1 \udcff", "token=[redacted: token] \udcff"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_shape_of_a_line_stays(line: str, shown: str) -> None:
    assert Redactor().words(line) == shown


def test_the_shape_of_json_within_json_stays() -> None:
    inner = json.dumps({"line": json.dumps({"secret": 'x"y\\z', "n": 5}), "k": 1})
    found = json.loads(json.loads(Redactor().words(inner))["line"])
    assert found == {"secret": "[redacted: secret]", "n": 5}


def pem(lines: int = 12, kind: str = "RSA ") -> str:
    body = "\n".join(
        base64.b64encode(random.Random(n).randbytes(48)).decode() for n in range(lines)
    )
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


@pytest.mark.parametrize("kind", ["", "RSA ", "OPENSSH ", "ENCRYPTED ", "EC "])
def test_private_keys_go_as_a_whole(kind: str) -> None:
    key = pem(kind=kind)
    for text in (
        key,
        json.dumps({"key": key}),
        json.dumps(json.dumps({"key": key})),
        json.dumps(key.splitlines()),
        repr(key),
        "\n".join(f"[rank3]: {line}" for line in key.splitlines()),
        key.replace("\n", "\r\n"),
        "\n".join(f"    {line}" for line in key.splitlines()),
    ):
        shown = Redactor().words(f"before\n{text}\nbehind")
        for line in key.splitlines()[1:-1]:
            assert line[:20] not in shown
        assert shown.startswith("before\n")
        assert shown.endswith("\nbehind")
        assert shown.count("\n") == text.count("\n") + 2


def test_what_is_left_of_a_private_key_goes_too() -> None:
    lines = pem().splitlines()
    for text in ("\n".join(lines[:7]) + "\nand on", "it begins\n" + "\n".join(lines[5:])):
        shown = Redactor().words(text)
        assert not [line for line in lines[1:-1] if line[:20] in shown]
    said = Redactor().words("expected -----BEGIN PRIVATE KEY----- in the file\nand another line")
    assert said == "expected [redacted: private-key] in the file\nand another line"


# --- values that are known -----------------------------------------------------------------------


VALUE = "qZ7-wX9_cV5bN3mK1jH8gF6dS4aP2"


def in_disguise(value: str) -> Iterator[str]:
    raw = value.encode()
    yield value
    yield f"x{value}y"
    yield urllib.parse.quote(value, safe="")
    yield "".join(f"%{byte:02x}" for byte in raw)
    yield json.dumps(json.dumps(value))
    yield "".join(f"\\u{ord(letter):04x}" for letter in value)
    yield raw.hex()
    yield raw.hex().upper()
    yield base64.b64encode(raw).decode()
    yield base64.b64encode(raw + b"\n").decode()
    yield base64.urlsafe_b64encode(b"u:" + raw).decode()
    yield base64.b64encode(b"user:" + raw + b"@host and more").decode()
    yield base64.encodebytes(b"some words before it, to fill a line of it, " + raw * 2).decode()
    yield "\n".join(value)
    yield str(list(value))
    yield " ".join(value)
    yield f"{value[:14]}\n{value[14:]}"
    yield f"{value[:14]}\x1b[0m\x1b[32m{value[14:]}"
    yield f"INFO first {value[:15]}\nINFO then {value[15:]}"
    yield value.encode("utf-16-le").decode("latin-1")
    yield f"{value[:20]}..."


@pytest.mark.parametrize("text", list(in_disguise(VALUE)))
def test_a_known_value_is_found_in_any_disguise(text: str) -> None:
    text = f"before {text} behind"
    shown = Redactor(KnownValues([VALUE.encode()])).text(text.encode("latin-1"))
    assert b"[redacted: known-value]" in shown
    assert shown.startswith(b"before ")
    assert shown.endswith(b" behind")
    for at in range(0, len(VALUE) - 10, 3):
        assert VALUE[at : at + 10].encode() not in shown
    assert shown.count(b"\n") == text.count("\n")
    bare = re.sub(rb"\[redacted: known-value\]|[^A-Za-z0-9]", b"", shown)
    assert len(bare) < len(re.sub("[^A-Za-z0-9]", "", text)) - 15


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_token_that_was_wrapped_goes_to_its_end(width: int) -> None:
    token = "hf_qWcXvBnMlKjHgFdSaPoIuYtReW12345678pQ4rS6tU"
    text = f"HF_TOKEN={token}".rjust(width + 25)
    shown = Redactor().words(f"{text[:width]}\n{text[width:]} and on\nnext")
    assert shown.split("HF_TOKEN=")[1] == "[redacted: token]\n and on\nnext"


def test_what_is_long_goes_to_its_end() -> None:
    value = base64.b64encode(random.Random(3).randbytes(3000)).decode()
    mark = r"\[redacted: known-value\]"
    for text in (value, "\n".join(value[at : at + 70] for at in range(0, len(value), 70))):
        shown = Redactor(KnownValues([value.encode()])).words(f"before {text} behind")
        assert re.fullmatch(rf"before {mark}(\n|{mark})* behind", shown)
    # So does a secret without an end, as it comes.
    endless = Redactor().text(b"password='" + b"a1B2" * (LONGEST // 2) + b"' and on\nnext")
    assert b"a1B2" not in endless
    assert len(endless) < 200
    assert endless.endswith(b"\nnext")


def test_values_that_are_words_are_not_looked_for() -> None:
    redactor = Redactor(KnownValues([b"true", b"correct horse battery staple"]))
    words = "it is true: correct is not horse"
    assert redactor.words(words) == words
    assert redactor.words("correct-horse\nbattery staple!") == "[redacted: known-value]\n!"


def test_a_value_that_a_name_gave_away_is_looked_for_elsewhere() -> None:
    redactor, token = Redactor(), "token=[redacted: token]"
    assert redactor.words(f"{LONG} was token={LONG}") == f"[redacted: known-value] was {token}"
    assert redactor.learned == 1
    assert redactor.words(f"later {LONG}") == "later [redacted: known-value]"
    assert redactor.words("token=incorrect") == token
    assert redactor.words("it is incorrect") == "it is incorrect"


# --- streams -------------------------------------------------------------------------------------


SMALL_BLOCK = BLOCK // 4


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a stream, all a quarter of what they are."""
    monkeypatch.setattr(redactor, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(redactor, "HELD", HELD // 4)


def sample() -> bytes:
    """A long text with a secret every few lines, of every form."""
    chance, lines = random.Random(5), list[str]()
    while sum(map(len, lines)) < 3 * SMALL_BLOCK:
        lines.append(chance.choice(forms()).format(chance.choice((SHORT, LONG))))
        lines += [f"step {n} loss {chance.random()}" for n in range(chance.randrange(12))]
        if chance.random() < 0.02:
            lines.append(pem(40))
        if chance.random() < 0.005:
            lines.append("a long line " * 2000 + f" token={LONG} " + "and on " * 2000)
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def at_once() -> tuple[bytes, list[bytes], bytes]:
    """A text, the secrets that are learned from it, and what is shown of it in one piece."""
    text = sample()
    taught = Redactor()
    taught.text(text)
    known = list(taught.known.values)  # what is learned depends on what was seen before
    return text, known, Redactor(KnownValues(known)).text(text)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("size", [997, 65_537])
def test_pieces_do_not_matter(at_once: tuple[bytes, list[bytes], bytes], size: int) -> None:
    text, known, whole = at_once
    pieces = (text[at : at + size] for at in range(0, len(text), size))
    assert b"".join(Redactor(KnownValues(known)).redact_stream(pieces)) == whole
    assert SHORT.encode() not in whole
    assert LONG.encode() not in whole
    for kept in (b"\n", b"loss 0."):
        assert whole.count(kept) == text.count(kept)
    assert list(Redactor().redact_stream([])) == list(Redactor().redact_stream([b"", b""])) == [b""]


def test_a_name_and_its_value_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However blocks end: nothing but the line above tells that these words are secrets."""
    monkeypatch.setattr(redactor, "BLOCK", 997)
    monkeypatch.setattr(redactor, "HELD", 200)
    text = b"\npassword:\n  hunter2x\n" * 5000
    shown = Redactor().text(text)
    assert b"hunter" not in shown
    assert shown.count(b"[redacted: password]") == 5000


@pytest.mark.usefixtures("small_blocks")
def test_nothing_is_kept_of_a_long_stream() -> None:
    """As much goes out as comes in, but for a block."""
    given = 0

    def pieces() -> Iterator[bytes]:
        nonlocal given
        for _ in range(40):
            piece = b"a line of a log with token=abc123def in it\n" * 750
            given += len(piece)
            yield piece

    shown = 0
    for piece in Redactor().redact_stream(pieces()):
        shown += len(piece.replace(b"[redacted: token]", b"abc123def"))
        assert given - shown < 2 * SMALL_BLOCK + HELD // 4
    assert shown == given


def test_a_part_of_a_stream_is_redacted_as_in_the_whole() -> None:
    text = f"one\n{pem()}\ntwo token={LONG} three\n".encode()

    def shown(**part: int) -> bytes:
        return b"".join(Redactor().redact_stream([text], **part))

    middle = text.index(b"KEY-----\n") + 100
    assert shown(end=middle).startswith(b"one\n[redacted")
    assert shown(start=middle).startswith(b"[redacted: private-key]\n")
    assert shown(start=middle).endswith(b"\ntwo token=[redacted: token] three\n")
    for cut in range(0, len(text), 7):
        assert LONG.encode()[:8] not in shown(end=cut) + shown(start=cut)
    assert shown(start=5, end=5) in (b"", b"[redacted: private-key]")


# --- bounds --------------------------------------------------------------------------------------


PATTERNS = [
    b"A" * 64 + b"\n",
    b"a", b"aA1", b"token", b"token=", b"token = ", b"token=/", b'token="', b"token\\",
    b"'token', ", b"password: ", b"password=[", b"password=\n", b"password=f(", b"secret ",
    b"secret: ", b"api key ", b"auth=(", b"cookie: '", b"<token>", b"<password>",
    b'"name": "HF_TOKEN", ', b"--token ", b"--token\n", b"key", b"key=", b"hf_", b"sk-", b"xoxb-",
    b"eyJ", b"eyJ.", b"MUNGE:", b"basic ", b"bearer ", b"login a password ", b"login(", b"://",
    b"://a:b", b"https://a:b@", b"x:y@", b"a.b:ccc@d", b"-----BEGIN PRIVATE KEY-----",
    b"-----END PRIVATE KEY-----", b"%41", b"%2525", b"\\", b'"', b"'", b'\\"', b'\\\\\\"',
    b"\\u0041", b"&amp;", b"\x00", b"a\x00", b"\x1b[", b"\x1b]", b"[", b"{", b"=", b" ", b"\t",
    b"\n", b"_-.", b"curl ", b"curl -u ", b"wandb ", b"docker login -p ", b"echo a", b"qZ7-wX9_",
    b"10.1.2.3 ", b"fe80::", b"/home/", b"a@b.", b"hpc07.", b"hpc[0",
]  # fmt: skip


def redacted(line: bytes) -> bytes:
    redactor = Redactor(KnownValues([VALUE.encode()]), Pseudonyms(["alice"], ["hpc07", "hpc08"]))
    return redactor.text(line)


@pytest.mark.timeout(300)  # a guard: it takes less than a second
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda one: repr(one)[2:-1][:20])
def test_a_long_line_takes_time_in_proportion(pattern: bytes) -> None:
    """With one pattern that tries everything it would take minutes, or for ever."""
    line = (pattern * BLOCK)[: BLOCK // 8]
    once, twice = (calls(partial(redacted, line[:size])) for size in (BLOCK // 16, BLOCK // 8))
    assert twice < 2.2 * once + 1000


def test_garbage_is_survived() -> None:
    chance = random.Random(9)
    redactor = Redactor(KnownValues([VALUE.encode()]), Pseudonyms(["alice"], ["hpc07"]))
    words = [form.format(SHORT).encode() for form in forms()] + PATTERNS
    for _ in range(150):
        text = b"".join(
            chance.choice(words) if chance.random() < 0.6 else chance.randbytes(9) for _ in range(9)
        )
        assert redactor.text(text).count(b"\n") == text.count(b"\n")
        for view in read_views(text):
            for start in range(0, len(view.text), 5):
                first, last = view.map_back(start, min(start + 3, len(view.text)))
                assert 0 <= first <= last <= len(text)
    noise = chance.randbytes(1 << 18)
    assert redactor.text(noise).count(b"\n") == noise.count(b"\n")


# --- pseudonyms ---------------------------------------------------------------------------------


def test_stand_ins_are_the_same_everywhere() -> None:
    pseudonyms = Pseudonyms(["alice"], ["hpc07", "hpc08", "login1"])
    redactor = Redactor(pseudonyms=pseudonyms)
    for text, shown in {
        "/home/alice/x /home/bob99/y alice": "/home/USER/x /home/USER-2/y USER",
        "hpc08.cluster.example.org, hpc[07-08], hpc070": "node-2, node-[...], hpc070",
        "demo.4711.hpc07.0.out": "demo.4711.node-1.0.out",
        "bob99@site.org bob99@site.org": "person-1@example.org person-1@example.org",
        "git@github.com:x/y": "git@github.com:x/y",
        "10.1.2.3:29500 and 10.1.2.3 and 10.1.2.4": "ip-1:29500 and ip-1 and ip-2",
        "fe80::1ff:fe23:4567:890a/64": "ip-3/64",
        "127.0.0.1 ::1 0.0.0.0 12:34:56": "127.0.0.1 ::1 0.0.0.0 12:34:56",
        "c10::d 1.2.3": "c10::d 1.2.3",
        "nvidia-curand-cu12==10.3.5.147": "nvidia-curand-cu12==10.3.5.147",
        "https://mirror.site.org/x https://pytorch.org/x": "https://host-1/x https://pytorch.org/x",
        "/home/root /home/data on localhost": "/home/root /home/data on localhost",
    }.items():
        assert redactor.words(text) == shown
    assert pseudonyms.learned == 1
    plain = "alice on hpc07 at 10.1.2.3 in /home/alice"
    assert Redactor().words(plain) == plain
