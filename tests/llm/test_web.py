"""The chat page in headless Chromium, against a server with a fake model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.llm.fakes import FakeEngine
from tests.llm.test_server import running
from whit.llm.sampling import SamplingParams

PAGE = Path(__file__).parents[2] / "whit" / "llm" / "web" / "index.html"

RICH = """# A title
Some **bold**, *slanted* and `coded` text, a [link](https://example.com/a_b) and
<img src=x onerror="document.title='broken in'"> <script>document.title='broken in'</script>

1. one
2. two
   - inner

> a quote

| a | b |
| - | - |
| 1 | 2 |

```python
def f(x):
    return "<b>" + x
```
[bad](javascript:document.title='broken in')
"""


def test_the_page_needs_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", text)
    assert not re.findall(
        r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
    )


def say(prompt: str, params: SamplingParams) -> str:
    if "rich" in prompt:
        return RICH
    if "long" in prompt:
        return "word " * 400
    return "You said: " + prompt.rsplit("user: ", 1)[1].removesuffix("\nassistant:")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no chromium")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say, delay=0.002)


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with running(engine) as url:
        yield url


def opened(browser: Any, address: str, **options: Any) -> Any:
    context = browser.new_context(**options)
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.problems = []
    page.on(
        "console", lambda message: page.problems.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    return page


def send(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def done(page: Any, count: int) -> Any:
    page.wait_for_selector("#send[aria-label=Send]")
    answers = page.locator(".turn.assistant")
    assert answers.count() == count
    return answers.nth(count - 1)


@pytest.mark.slow
def test_send_stream_stop_and_reload(browser: Any, address: str, engine: FakeEngine) -> None:
    page = opened(browser, address)
    send(page, "hello there")
    assert done(page, 1).locator(".body").inner_text() == "You said: hello there"
    assert re.fullmatch(r"[\d.]+ tokens/s", page.inner_text("#speed"))
    send(page, "something long")
    page.wait_for_function("() => document.querySelectorAll('.turn.assistant')[1]?.innerText.length > 100")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    page.click("#send")
    stopped = done(page, 2)
    assert "Stopped." in stopped.inner_text()
    text = stopped.locator(".body").inner_text()
    assert 100 < len(text) < 1999
    for _ in range(100):
        if engine.stats.cancelled:
            break
        page.wait_for_timeout(50)
    assert engine.stats.cancelled == 1
    page.reload()
    page.wait_for_selector(".turn.assistant")
    assert page.locator(".turn").count() == 4
    assert page.locator(".turn.assistant").nth(1).locator(".body").inner_text() == text
    assert page.inner_text("#list .open") == "hello there"
    page.click("#new")
    assert page.locator(".turn").count() == 0
    send(page, "another")
    done(page, 1)
    assert page.locator("#list li").count() == 2
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#list li[aria-current=true] .drop")
    assert page.locator("#list li").count() == 1 and page.locator(".turn").count() == 4
    assert not page.problems
    page.context.close()


@pytest.mark.slow
def test_markdown_is_shown_and_nothing_gets_in(browser: Any, address: str) -> None:
    page = opened(browser, address)
    send(page, "rich please")
    body = done(page, 1).locator(".body")
    for selector, text in (
        ("h1", "A title"), ("strong", "bold"), ("em", "slanted"), ("p code", "coded"), ("ol ul li", "inner"),
        ("blockquote", "a quote"), ("td >> nth=1", "2"), ("pre code", 'def f(x):\n    return "<b>" + x'),
        (".block header span", "python"), ("a >> nth=0", "link"),
    ):  # fmt: skip
        assert body.locator(selector).first.inner_text().strip() == text
    assert "<img src=x" in body.inner_text() and "<script>" in body.inner_text()
    assert body.locator("img, script").count() == 0
    assert [a.get_attribute("href") for a in body.locator("a").all()] == ["https://example.com/a_b"]
    assert "broken in" not in page.title()
    assert not page.problems
    page.context.close()


@pytest.mark.slow
def test_settings_theme_keys_and_errors(browser: Any, address: str, engine: FakeEngine) -> None:
    page = opened(browser, address, color_scheme="light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.click("#settings")
    page.fill("[name=system]", "be brief")
    page.fill("[name=temperature]", "0.3")
    page.fill("[name=top_k]", "7")
    page.fill("[name=seed]", "12")
    page.fill("[name=max_tokens]", "5")
    page.click("dialog .main")
    send(page, "hello")
    answer = done(page, 1)
    assert "limit" in answer.inner_text()
    prompt, params = engine.seen[-1]
    assert bytes(prompt).startswith(b"system: be brief\nuser: hello")
    assert (params.temperature, params.top_k, params.seed, params.max_tokens, params.top_p) == (
        0.3,
        7,
        12,
        5,
        1.0,
    )
    page.reload()
    assert page.inner_text("#theme") == "Theme: dark"
    page.evaluate("settings.max_tokens = ''; settings.temperature = 9")
    send(page, "too hot")
    assert "temperature" in done(page, 2).locator(".error").inner_text()
    page.context.close()
    with running(FakeEngine(say), keys=["secret"]) as locked:
        page = browser.new_context().new_page()
        page.goto(locked)
        page.wait_for_function("() => document.getElementById('note').textContent.includes('API key')")
        page.click("#settings")
        page.fill("[name=key]", "secret")
        page.click("dialog .main")
        page.wait_for_selector("#model option", state="attached")
        send(page, "hi")
        assert done(page, 1).locator(".body").inner_text() == "You said: hi"
        page.context.close()


@pytest.mark.slow
def test_phone_and_keyboard(browser: Any, address: str) -> None:
    page = opened(browser, address, viewport={"width": 360, "height": 640}, color_scheme="dark")
    send(page, "rich please")
    done(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.locator("#side").is_visible()
    page.click("#menu")
    page.wait_for_timeout(300)
    assert page.locator("#side").is_visible() and page.evaluate("document.activeElement.id") == "new"
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)
    assert not page.locator("#side").is_visible() and page.evaluate("document.activeElement.id") == "menu"
    names = page.evaluate(
        "[...document.querySelectorAll('button, select, textarea')].filter(e => !e.closest('dialog') && "
        "!(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).length"
    )
    assert names == 0
    page.focus("#input")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#input") == "one\ntwo"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    page.keyboard.press("Enter")
    done(page, 2)
    assert page.locator(".turn.user .body").nth(1).inner_text() == "one\ntwo"
    assert not page.problems
    page.context.close()
