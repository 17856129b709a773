import os

from stager.lock.indexes import Indexes, pip_settings, restore_credentials, strip_credentials

FULL = Indexes(
    index_url="https://u:p@one.example/simple",
    extra_index_urls=("https://two.example/simple?token=abc", "file:///srv/simple"),
    find_links=("/srv/with space", "https://u:p@files.example/"),
    trusted_hosts=("two.example",),
    only_binary=("a",),
    no_binary=("b", "c"),
    pre=True,
)


def test_credentials_are_stripped():
    for url, expected in (
        ("https://u:p@h.example:8080/x/y.whl?sig=1#sha256=0", "https://h.example:8080/x/y.whl"),
        ("https://token@h.example/x", "https://h.example/x"),
        ("https://${USER}:${TOKEN}@h.example/x", "https://${USER}:${TOKEN}@h.example/x"),
        ("https://${TOKEN}@h.example/x", "https://${TOKEN}@h.example/x"),
        ("https://me:${TOKEN}@h.example/x", "https://h.example/x"),
        ("https://u:p@ss@h.example/x", "https://h.example/x"),
        ("git+ssh://git@h.example/x.git@v1", "git+ssh://h.example/x.git@v1"),
        ("git+file:///srv/x.git@v1", "git+file:///srv/x.git@v1"),
        ("file:///srv/a%20b.whl", "file:///srv/a%20b.whl"),
        ("/srv/a@b.whl", "/srv/a@b.whl"),
    ):
        assert strip_credentials(url) == expected


def test_credentials_of_a_file_are_put_back():
    for locked, known, full in (
        (
            "https://h.example/x.whl",
            "https://u:p@h.example/x.whl?t=1#sha256=0",
            "u:p@h.example/x.whl?t=1",
        ),
        (
            "https://h.example/x.tar.gz#sha256=0",
            "https://h.example/x.tar.gz?t=1",
            "h.example/x.tar.gz?t=1#sha256=0",
        ),
        (
            "git+https://h.example/x.git@abc#subdirectory=b",
            "git+https://u:p@h.example/x.git@main",
            "u:p@h.example/x.git@abc#subdirectory=b",
        ),
        (
            "git+ssh://h.example/x.git@abc",
            "git+ssh://git@h.example/x.git",
            "git@h.example/x.git@abc",
        ),
        ("https://other.example/x.whl", "https://u:p@h.example/x.whl", "other.example/x.whl"),
    ):
        assert (
            restore_credentials(locked, ["https://h.example/y", known]).partition("://")[2] == full
        )


def test_as_lines():
    assert FULL.pip_lines() == [
        "--index-url https://u:p@one.example/simple",
        "--extra-index-url https://two.example/simple?token=abc",
        "--extra-index-url file:///srv/simple",
        "--find-links file:///srv/with%20space",
        "--find-links https://u:p@files.example/",
        "--only-binary a",
        "--no-binary b",
        "--no-binary c",
        "--trusted-host two.example",
        "--pre",
    ]
    alone = Indexes(no_index=True, index_url="https://x", find_links=("/srv",))
    assert alone.lines() == ["--no-index", "--find-links file:///srv"]


def test_written_down_without_credentials_and_read_back():
    written = FULL.to_dict()
    assert "u:p" not in str(written)
    assert "abc" not in str(written)
    bare = FULL.strip_credentials()
    assert Indexes.from_dict(written) == bare
    assert bare.restore_credentials(FULL) == FULL
    assert Indexes().to_dict() == {}
    other = Indexes(index_url="https://other.example/simple")
    assert other.restore_credentials(FULL) == other
    assert Indexes.from_dict({"index-url": 3, "find-links": "x", "other": 1}) == Indexes()


def test_two_together():
    both = Indexes(index_url="a", find_links=("x", "y")).merge(
        Indexes(index_url="b", find_links=("y", "z"), no_index=True)
    )
    assert both == Indexes(index_url="b", find_links=("x", "y", "z"), no_index=True)


def test_pips_configuration(tmp_path, monkeypatch):
    for name in [n for n in os.environ if n.startswith(("PIP_", "UV_")) or n == "SSL_CERT_FILE"]:
        monkeypatch.delenv(name)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.example/simple\n"
        "extra-index-url =\n    https://two.example/simple\n    https://three.example/simple\n"
        "cert = /etc/one.pem\nproxy = http://proxy.example:3128\ntimeout = 33\n"
        "[install]\nfind-links = /srv/a /srv/b\nno-index = true\ntrusted-host = two.example\n"
        "[list]\nformat = json\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "https://it's.example/simple")
    found = pip_settings()
    assert found.indexes == Indexes(
        index_url="https://it's.example/simple",
        extra_index_urls=("https://two.example/simple", "https://three.example/simple"),
        find_links=("/srv/a", "/srv/b"),
        no_index=True,
        trusted_hosts=("two.example",),
    )
    assert found.environment == {
        "SSL_CERT_FILE": "/etc/one.pem",
        "UV_HTTP_TIMEOUT": "33",
        "UV_INSECURE_HOST": "two.example",
        "ALL_PROXY": "http://proxy.example:3128",
    }
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/own.pem")
    assert "SSL_CERT_FILE" not in pip_settings().environment
