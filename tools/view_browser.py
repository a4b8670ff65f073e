"""`verlc view` in headless Chromium: time to the first plot, frames a second while samples scroll, keys, no error on the
console, screenshots at desktop and phone width in light and dark.

    python3 tools/view_browser.py RUN_DIR [--shots DIR] [--only light-desktop]

By hand, not in CTest: it needs Debian's chromium and the Python package websockets. tests/view_db.py makes a large run."""

import argparse
import asyncio
import base64
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import websockets

VERLC = os.environ.get("VERLC", "build/release/verlc")
FIRST_PLOT_S, FPS = 1.0, 55  # the bars; a display of 60 Hz shows 60, less what rounding takes
LOOKS = {
    "light-desktop": ("light", 1440, 900),
    "dark-desktop": ("dark", 1440, 900),
    "light-phone": ("light", 390, 844),
    "dark-phone": ("dark", 390, 844),
}


class Page:
    """One tab, by the DevTools protocol."""

    def __init__(self, socket, problems):
        self.socket, self.number, self.waiting, self.problems = socket, 0, {}, problems
        self.reader = asyncio.create_task(self.read())

    async def read(self):
        async for text in self.socket:
            m = json.loads(text)
            if "id" in m:
                self.waiting.pop(m["id"]).set_result(m)
            elif m["method"] == "Runtime.exceptionThrown":
                d = m["params"]["exceptionDetails"]
                self.problems.append("console: " + d.get("exception", {}).get("description", d["text"]))
            elif m["method"] == "Log.entryAdded" and m["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append("console: " + m["params"]["entry"]["text"] + " " + m["params"]["entry"].get("url", ""))
            elif m["method"] == "Runtime.consoleAPICalled" and m["params"]["type"] in ("error", "warning", "assert"):
                self.problems.append("console: " + str(m["params"]["args"]))

    async def send(self, method, **params):
        self.number += 1
        self.waiting[self.number] = answer = asyncio.get_running_loop().create_future()
        await self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        m = await asyncio.wait_for(answer, 60)
        if "error" in m:
            raise RuntimeError(f"{method}: {m['error']}")
        return m["result"]

    async def run(self, script):
        r = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in r:
            raise RuntimeError(r["exceptionDetails"].get("exception", {}).get("description", str(r)))
        return r["result"].get("value")

    async def until(self, condition, seconds=15):
        for _ in range(int(seconds / 0.02)):
            if await self.run(f"!!({condition})"):
                return True
            await asyncio.sleep(0.02)
        print(f"still not: {condition}", flush=True)
        self.problems.append(f"still not: {condition}")
        return False

    async def look(self, scheme, width, height):
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        await self.send("Emulation.setTouchEmulationEnabled", enabled=width < 600)

    async def go(self, url):
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)

    async def key(self, key):
        codes = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9}
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                text="\r" if key == "Enter" and kind == "keyDown" else "",
            )

    async def shot(self, path):
        r = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(r["data"]))


PLOT = (
    "[...document.querySelectorAll('.chart canvas')].some(c => c.width && c.getContext('2d').getImageData(0, 0, c.width, "
    "c.height).data.some((v, i) => i % 4 === 3 && v > 0))"
)
IDLE = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"
SCROLL = """new Promise(done => { const list = document.querySelector('.vlist'); let at = 0, frames = 0, from, last, worst = 0;
  const turn = now => { from ??= now; if (last) worst = Math.max(worst, now - last); last = now;
    frames++; at += 37; list.scrollTop = at;
    if (now - from < 2000) requestAnimationFrame(turn); else done([(frames - 1) / (now - from) * 1000, worst, at]); };
  requestAnimationFrame(turn); })"""
FIRST_PLOT = f"""new Promise(done => {{
  const turn = () => {{ if ({PLOT}) done(performance.now()); else requestAnimationFrame(turn); }}; turn(); }})"""


async def measure(page, url, run_id, bad):
    times = []
    for _ in range(3):
        await page.go(f"{url}#/{run_id}/overview")
        await page.until("document.querySelector('.chart canvas')")
        times.append(await page.run(FIRST_PLOT) / 1000)
    print(f"first plot: {', '.join(f'{t:.2f}' for t in times)} s after the navigation began (bar {FIRST_PLOT_S} s)")
    if max(times) > FIRST_PLOT_S:
        bad.append("first plot")
    for by in ("sample", "group"):
        await page.go(f"{url}#/{run_id}/samples/last?by={by}")
        await page.until("document.querySelectorAll('.vlist .item').length > 5")
        await asyncio.sleep(0.5)
        fps, worst, way = await page.run(SCROLL)
        print(f"scrolling {by}s: {fps:.1f} frames/s, longest frame {worst:.0f} ms, {way} px in 2 s (bar {FPS})")
        if fps < FPS:
            bad.append(f"frames of {by}s")


async def keys(page, url, run_id, bad):
    """From the overview to a token by the keyboard alone."""
    await page.go(f"{url}#/{run_id}/overview")
    ok = await page.until(PLOT)
    await page.run("document.querySelector('.plot').focus()")
    await page.key("ArrowLeft")
    await page.key("ArrowLeft")
    await page.key("Enter")
    ok = ok and await page.until("location.hash.includes('/samples/') && document.querySelector('.vlist .item')")
    first = await page.run("location.hash")
    await page.key("ArrowLeft")
    ok = ok and await page.until(f"location.hash !== {json.dumps(first)}")
    await page.run("document.querySelector('.vlist').focus()")
    await page.key("ArrowDown")
    await page.key("Enter")
    ok = ok and await page.until("document.querySelector('.tokens span[data-i]')")
    await page.run("document.querySelector('.tokens').focus()")
    await page.key("ArrowRight")
    await page.key("ArrowRight")
    ok = ok and await page.until("document.querySelector('.tokens .at') && !document.getElementById('tip').hidden")
    await page.run("document.activeElement.blur()")
    await page.key("Escape")
    ok = ok and await page.until("document.querySelector('.vlist')")
    names = await page.run(
        "[...document.querySelectorAll('button, input, select, a, [tabindex]')].filter(e => !(e.getAttribute('aria-label') "
        "|| e.textContent.trim() || e.labels?.length || e.title)).map(e => e.outerHTML)"
    )
    if names:
        bad.append(f"no name for a screen reader: {names}")
    if not ok:
        bad.append("keys")
    print(f"keyboard: {'ok' if ok else 'FAIL'}")


async def functions(page, url, run_id, bad):
    """What the page does by itself: exports, filters and an order that stay in the address, tokens by name, a band."""
    ok = True
    await page.go(f"{url}#/{run_id}/overview")
    ok &= await page.until(PLOT)
    await page.run(
        "window.saved = []; URL.createObjectURL = b => { saved.push(b); return 'blob:x'; }; URL.revokeObjectURL = () => {};"
        "HTMLAnchorElement.prototype.click = function () { saved.push(this.download); }"
    )
    for i in range(2):
        await page.run("document.querySelector('.chart .menu summary').click()")
        await page.run(f"document.querySelectorAll('.chart .menu button')[{i}].click()")
    ok &= await page.until("saved.length === 4")
    csv = await page.run("saved[0].text()")
    png = await page.run(
        "(async () => { const b = new Uint8Array(await saved[2].arrayBuffer()); const i = await createImageBitmap("
        "saved[2]); return [String.fromCharCode(...b.slice(1, 4)), i.width, i.height]; })()"
    )
    steps = await page.run("document.querySelectorAll('.chart').length")
    names = await page.run("[saved[1], saved[3]]")
    good = csv.startswith("step,") and csv.count("\r\n") > 2 and png[0] == "PNG" and png[1] > 300 and png[2] > 150
    if not (good and steps and names == ["Reward.csv", "Reward.png"]):
        bad.append(f"export: {csv[:60]!r} {png} {names}")
    await page.go(f"{url}#/{run_id}/samples/last?by=sample&min=1&q=boxed")
    ok &= await page.until(
        "document.querySelector('.item.sample') && /^[0-9,]+ of/.test(document.querySelector('[role=status]')"
        ".textContent) && document.querySelector('[role=status]').textContent.split(' of ')[0] !== "
        "document.querySelector('[role=status]').textContent.split(' of ')[1].split(' ')[0]"
    )
    pills = await page.run("[...document.querySelectorAll('.item .pill')].every(e => e.textContent === '1')")
    await page.key("ArrowLeft")
    ok &= await page.until("/min=1/.test(location.hash) && /q=boxed/.test(location.hash) && !/last/.test(location.hash)")
    ok &= await page.until("JSON.parse(sessionStorage.getItem('shown')).address === location.hash")  # the step's rows are there
    kept = await page.run("location.hash")
    await page.run("document.querySelector('.item.sample').click()")
    ok &= await page.until("document.querySelector('.columns') && document.querySelector('.tokens.prompt span.sp')")
    names = await page.run("[...document.querySelectorAll('.tokens.prompt span.sp')].map(e => e.textContent)")
    if names[:2] != ["<|im_start|>", "<|im_end|>"]:
        bad.append(f"special tokens by name: {names}")
    await page.run("document.activeElement.blur()")
    await page.key("Escape")
    ok &= await page.until(f"location.hash === {json.dumps(kept)}")
    if not pills:
        bad.append("a range of scores shows others")
    await page.go(f"{url}#/?all")
    ok &= await page.until("document.querySelector('button.sort[data-key=reward]')")
    await page.run("document.querySelector('button.sort[data-key=reward]').click()")
    ok &= await page.until("/sort=reward&down=1/.test(location.hash) && document.querySelector('[aria-sort=descending]')")
    await page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '?', bubbles: true}))")
    ok &= await page.until("document.querySelector('dialog').open && document.querySelectorAll('dialog kbd').length > 5")
    await page.key("Escape")
    ok &= await page.until("!document.querySelector('dialog').open")
    if not ok:
        bad.append("functions of the page")
    print(f"exports, filters, order, list of keys: {'ok' if ok else 'FAIL'}")


async def pictures(page, url, run_id, shots, only, bad):
    group = await page.run(
        f"fetch('/api/steps?run={run_id}').then(r => r.json()).then(j => Number(new "
        f"BigInt64Array(Uint8Array.from(atob(j.step), c => c.charCodeAt(0)).buffer).at(-1)))"
    )
    uid = await page.run(f"fetch('/api/samples?run={run_id}&step={group}').then(r => r.json()).then(j => j.samples[0].uid)")
    places = {
        "runs": "#/?all",
        "sorted": "#/?all&sort=reward&down=1",
        "overview": f"#/{run_id}/overview",
        "metrics": f"#/{run_id}/metrics?q=actor",
        "samples": f"#/{run_id}/samples/last",
        "list": f"#/{run_id}/samples/last?by=sample",
        "filtered": f"#/{run_id}/samples/last?by=sample&min=0.5&q=boxed",
        "group": f"#/{run_id}/samples/{group}/{uid}",
        "prompt": f"#/{run_id}/prompt/{uid}",
        "scatter": f"#/{run_id}/scatter",
        "search": f"#/{run_id}/search?q=boxed&min=1",
        "rewards": f"#/{run_id}/rewards",
        "time": f"#/{run_id}/time",
        "config": f"#/{run_id}/config",
        "set": f"#/{run_id}/config?show=set",
    }
    others = await page.run("fetch('/api/runs').then(r => r.json()).then(j => j.runs.filter(r => !r.error).map(r => r.id))")
    if len(others) > 1:
        places["compare"] = "#/compare?" + "&".join(f"run={i}" for i in others[:4])
        places["seeds"] = places["compare"] + "&group=seeds"
        places["differs"] = f"#/{run_id}/config?show=differs&with={next(i for i in others if i != run_id)}"
    for look, (scheme, width, height) in LOOKS.items():
        if only and look != only:
            continue
        await page.look(scheme, width, height)
        for name, place in places.items():
            await page.go(url + place)
            await page.until(IDLE)
            await asyncio.sleep(0.7)
            wide = await page.run("document.documentElement.scrollWidth - innerWidth")
            if wide > 0:
                bad.append(f"{name} at {look} is {wide} px wider than the window")
            if shots:
                await page.shot(shots / f"{name}-{look}.png")
        await page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '?', bubbles: true}))")
        if not await page.run("document.querySelector('dialog')?.open"):
            bad.append(f"the list of keys at {look} does not open")
        if shots:
            await page.shot(shots / f"keys-{look}.png")


async def browse(a, url, bad):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its last helper may still write
        browser = subprocess.Popen(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                f"--user-data-dir={profile}",
                "--remote-debugging-port=0",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            port = next(line.split(":")[2].split("/")[0] for line in browser.stderr if "DevTools listening" in line)
            tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
            async with websockets.connect(
                next(t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page"), max_size=1 << 28
            ) as socket:
                page = Page(socket, bad)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                await page.look("light", 1440, 900)
                await page.go(url)
                await page.until(IDLE)
                runs = await page.run("fetch('/api/runs').then(r => r.json())")
                run_id = next(r["id"] for r in runs["runs"] if "error" not in r)
                if not a.only:
                    await measure(page, url, run_id, bad)
                    await keys(page, url, run_id, bad)
                    await functions(page, url, run_id, bad)
                if not a.measure:
                    await pictures(page, url, run_id, a.shots, a.only, bad)
                page.reader.cancel()
        finally:
            browser.terminate()
            browser.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("run")
    p.add_argument("--shots", type=pathlib.Path)
    p.add_argument("--only", choices=LOOKS, help="pictures of this look, no measurement")
    p.add_argument("--measure", action="store_true", help="measurement and keys, no pictures")
    a = p.parse_args()
    if a.shots:
        a.shots.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([VERLC, "view", a.run], stdout=subprocess.PIPE, text=True)
    bad = []
    try:
        url = server.stdout.readline().split()[-1]
        asyncio.run(browse(a, url, bad))
    finally:
        server.terminate()
        if server.wait() != 0:
            bad.append("the server's exit status")
        for b in dict.fromkeys(bad):
            print(f"FAIL: {b}")
    if not bad:
        print("ok: no error on the console, nothing wider than the window")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
