"""Somebody is told: real servers of `shardline up`, a real HTTP receiver, a real mail server."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tasks.runs.owner import ranks_launcher
from tasks.workspace.processes import free_port
from tests.support.local_servers import LocalServers
from tests.support.receivers import Receiver, http_receiver, mail_receiver
from tests.support.rig.certificates import make_authority, make_certificate
from tests.support.user_folder import UserFolder, wait_for_step
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TOKEN = "planted-token-6f1c2a"
SLACK_TOKEN = "planted9f0ec41d7b3a52c6"
SLACK_PATH = f"/services/T0ABCDEF1/B0ABCDEF2/{SLACK_TOKEN}"


@pytest.fixture(scope="module")
def web() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def mail() -> Iterator[Receiver]:
    with mail_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem and key.pem of hooks.slack.com, and the ca.pem that vouches for them."""
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder / "authority")
    make_certificate(folder, authority=folder / "authority", names=["hooks.slack.com"])
    return folder


@pytest.fixture(scope="module")
def slack(certificates: Path) -> Iterator[Receiver]:
    """In Slack's place for whoever takes it as proxy, and trusts ca.pem."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    with http_receiver(tls=tls) as receiver:
        yield receiver


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
    begun_home: Path,
    certificates: Path,
    slack: Receiver,
    web: Receiver,
    mail: Receiver,
) -> Iterator[LocalServers]:
    user_folder = UserFolder(tmp_path_factory.mktemp("user"), begun=begun_home)
    (user_folder.home / "web_url").write_text(f"http://127.0.0.1:{web.port}/hook/{TOKEN}\n")
    (user_folder.home / "token").write_text(f"Bearer {TOKEN}\n")
    write_alerts(user_folder, web=webhook(), ops=mailbox(mail), team={"kind": "slack", "url": "env:SLACK_URL"})
    started = LocalServers(user_folder)
    started.environment |= {
        "SLACK_URL": f"https://hooks.slack.com{SLACK_PATH}",
        "HTTPS_PROXY": f"http://127.0.0.1:{slack.port}",
        "REQUESTS_CA_BUNDLE": str(certificates / "ca.pem"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    try:
        started.start()
        yield started
    finally:
        started.stop()


def webhook(**more: Any) -> dict[str, Any]:
    return {"kind": "webhook", "url": "file:web_url", "headers": {"authorization": "file:token"}} | more


def mailbox(mail: Receiver, **more: Any) -> dict[str, Any]:
    address = {"kind": "email", "server": "127.0.0.1", "port": mail.port, "security": "none"}
    return address | {"to": ["night@example.com"], "sender": "shardline@example.com"} | more


def write_alerts(user_folder: UserFolder, **receivers: dict[str, Any]) -> None:
    (user_folder.home / "alerts.yaml").write_text(yaml.safe_dump({"alerts": receivers}))


def automations(servers: LocalServers) -> dict[str, dict[str, Any]]:
    found = servers.prefect("/automations/filter", {})
    return {each["name"]: each for each in found}


def ids(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: each["id"] for name, each in found.items()}


def check_nothing_more(servers: LocalServers, web: Receiver, mail: Receiver) -> None:
    """The next message that comes is the test that is sent now, since automations work in the order of events."""
    servers.user_folder.run("alerts", "--test", **servers.environment)
    assert json.loads(web.next().text)["event"] == "shardline.alerts.test"
    assert "Subject: Shardline: a test" in mail.next()
    assert web.rest() == mail.rest() == []


def test_a_test_is_delivered_to_each_receiver_and_said_so(
    servers: LocalServers, slack: Receiver, web: Receiver, mail: Receiver
) -> None:
    out, _ = servers.user_folder.run("alerts", "--test", "--json", **servers.environment)
    assert json.loads(out) == {"alerts": {"web": "delivered", "ops": "delivered", "team": "delivered"}}
    post = slack.next()
    assert post.path == SLACK_PATH
    assert "Shardline: a test" in post.text
    assert "What to do: nothing" in post.text
    assert json.loads(web.next().text)["event"] == "shardline.alerts.test"
    assert "Subject: Shardline: a test" in mail.next()


def test_a_run_that_fails_is_one_post_and_one_mail_with_its_reason_and_cure(
    servers: LocalServers, web: Receiver, mail: Receiver
) -> None:
    empty = servers.user_folder.folder / "empty"
    empty.mkdir()
    flow_run = servers.submit("pretrain", servers.config(f"data.path={empty}"))
    assert servers.wait(flow_run)["state_type"] == "FAILED"
    (run_dir,) = servers.user_folder.run_dirs()
    post = web.next()
    told = json.loads(post.text)
    assert post.headers["authorization"] == f"Bearer {TOKEN}"
    assert told["event"] == "shardline.run.failed"
    assert told["run"] == run_dir.name
    assert told["title"] == f"{run_dir.name} failed"
    assert str(empty) in told["why"]
    assert f"resume {run_dir.name}" in told["cure"]
    assert told["link"] == f"{servers.url('prefect')}/flow-runs/flow-run/{flow_run}"
    message = mail.next()
    assert f"Subject: Shardline: {run_dir.name} failed" in message
    assert empty.name in message
    run = servers.wait(servers.submit("reconcile"))
    assert run["state_type"] == "COMPLETED", run["state"]["message"]
    check_nothing_more(servers, web, mail)


@pytest.mark.long
def test_what_no_process_could_report_is_reported_by_reconcile(
    servers: LocalServers, web: Receiver, mail: Receiver
) -> None:
    user_folder = servers.user_folder
    known = user_folder.run_dirs()
    process = user_folder.start("pretrain", str(user_folder.config), "train.steps=100000")
    run_dir = wait_for_step(user_folder, process, known, 2)
    process.kill()
    process.communicate()
    user_folder.run("reconcile")
    told = json.loads(web.next().text)
    assert (told["event"], told["run"]) == ("shardline.run.crashed", run_dir.name)
    assert "killed" in told["why"]
    assert f"resume {run_dir.name}" in told["cure"]
    assert f"{run_dir.name} crashed" in mail.next()
    user_folder.run("reconcile")
    check_nothing_more(servers, web, mail)


def test_alerts_are_changed_by_the_file_and_no_secret_is_in_it_or_in_the_servers_files(
    servers: LocalServers, mail: Receiver
) -> None:
    user_folder, before = servers.user_folder, automations(servers)
    assert set(before) == {"Shardline tells web", "Shardline tells ops", "Shardline tells team"}
    servers.start()
    assert ids(automations(servers)) == ids(before), "made once"
    write_alerts(user_folder, web=webhook(events=["shardline.gate.refused"]))
    servers.start()
    (left,) = automations(servers).values()
    assert left["id"] == before["Shardline tells web"]["id"]
    assert set(left["trigger"]["expect"]) == {"shardline.gate.refused", "shardline.alerts.test"}
    blocks = servers.prefect("/block_documents/filter", {})
    assert [block["name"] for block in blocks if block["name"].startswith("shardline-alerts-")] == [
        "shardline-alerts-web"
    ]
    given = {"web_url", "token"}
    files = [path for path in user_folder.home.rglob("*") if path.is_file() and path.name not in given]
    holders = [path for path in files for secret in (TOKEN, SLACK_TOKEN) if secret.encode() in path.read_bytes()]
    assert holders == []
    write_alerts(user_folder, web=webhook(), ops=mailbox(mail))
    servers.start()


def test_what_is_wrong_with_the_file_is_said_before_anything_starts(tmp_path: Path) -> None:
    user_folder = UserFolder(tmp_path)
    user_folder.home.mkdir()
    for receivers, said in (
        ({"team": {"kind": "slack", "url": "https://hooks.slack.com/services/T0/B0/planted"}}, "team.slack.url"),
        ({"team": {"kind": "slack", "url": "env:NO_SUCH_URL"}}, "the environment has no NO_SUCH_URL"),
        ({"team": {"kind": "slack", "url": "file:no_such_file"}}, "no_such_file is empty or not there"),
        ({"team": {"kind": "slack", "url": "env:X", "events": ["run.failed"]}}, "team.slack.events.0"),
        ({"team": {"kind": "pigeon"}}, "pigeon"),
    ):
        write_alerts(user_folder, **receivers)
        _, err = user_folder.run("up", expect=2)
        assert said in err
        assert "planted" not in err
    assert not (user_folder.home / "up.json").exists()
    (user_folder.home / "alerts.yaml").unlink()
    assert "`shardline up`" in user_folder.run("alerts", expect=2)[1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_whose_ranks_hang_is_stuck_and_told_once(servers: LocalServers, web: Receiver, mail: Receiver) -> None:
    user_folder, known = servers.user_folder, servers.user_folder.run_dirs()
    hung = ("train.steps=100000", "parallel.strategy=single")
    process = user_folder.start("pretrain", str(user_folder.config), *hung)
    run_dir = wait_for_step(user_folder, process, known, 20)
    launcher = ranks_launcher(run_dir)
    assert launcher is not None
    ranks = [each for each in launcher.children(recursive=True) if "training.train" in each.cmdline()]
    assert ranks
    for rank in ranks:
        rank.suspend()
    try:
        told = json.loads(web.next().text)
        assert (told["event"], told["run"]) == ("shardline.run.stuck", run_dir.name)
        assert told["why"].startswith("no step after step ")
        assert f"stop {run_dir.name}" in told["cure"]
        assert f"{run_dir.name} is stuck" in mail.next()
    finally:
        for rank in ranks:
            rank.resume()
        user_folder.run("stop", run_dir.name)
        process.communicate()
    check_nothing_more(servers, web, mail)  # a run that somebody stopped is no failure


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_refusal_and_both_ways_to_take_a_champion_back_are_told(
    servers: LocalServers, web: Receiver, mail: Receiver
) -> None:
    user_folder, short = servers.user_folder, ("train.steps=4", "parallel.strategy=single")
    user_folder.run("pretrain", str(user_folder.config), *short)
    outcome = user_folder.run("pretrain", str(user_folder.config), *short, "gates.min_improvement=100", "--json")[0]
    told = json.loads(web.next().text)
    assert (told["event"], told["run"]) == ("shardline.gate.refused", json.loads(outcome)["run_id"])
    assert told["title"] == "the gates refused verses/2"
    assert "not passed" in told["why"]
    assert "promote verses --version 2" in told["cure"]
    assert "the gates refused verses/2" in mail.next()

    port = free_port()
    server = user_folder.start("serve", "verses/1", "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(f"{url}/health/ready"), "the server of version 1")
        rollout = (f"rollout.servers=[{url}]", "rollout.switch_timeout_s=60")
        user_folder.run("promote", "verses", "--version", "2", "--force", *rollout, expect=1)
    finally:
        server.terminate()
        server.communicate()
    told = json.loads(web.next().text)
    assert told["event"] == "shardline.champion.taken-back"
    assert told["title"] == "verses/2 is no longer champion, verses/1 is"
    assert "rolled back to version 1" in told["why"]
    assert "/flow-runs/flow-run/" in told["link"]
    assert "verses/1 is" in mail.next()

    user_folder.run("promote", "verses", "--version", "2", "--force")
    user_folder.run("rollback", "verses", "--why", "it answers in riddles")
    told = json.loads(web.next().text)
    assert told["event"] == "shardline.champion.taken-back"
    assert "it answers in riddles" in told["why"]
    assert "verses/1 is" in mail.next()
    check_nothing_more(servers, web, mail)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
