"""The explorer's page in a real browser: every control, with the mouse and without, and what it costs."""

import json
import re
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import pytest
from tests.browser.conftest import PAGE, WINDOW
from tests.browser.gestures import WORLDS, gestures
from tests.slow.making import LATE, report

from rankmesh.cli.look.explore import explored
from rankmesh.core.source import read_plan
from rankmesh.readers.source import read
from rankmesh.viz.explorer import page as page_text

RECORDINGS = Path(__file__).parents[1] / "hangs" / "recordings"
SPEC = "megatron:world=32,tp=2,cp=2,pp=2,ep=8,etp=1"


class Shown:
    """A page that is open, and what it said or asked for behind the user's back."""

    def __init__(self, page):
        self.page = page
        self.messages, self.asked = [], []
        # What the tests themselves read of the canvas is remarked upon.
        page.on("console", lambda message: "getImageData" in message.text or self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def goto(self, fragment="", path=PAGE):
        """Open the page with this fragment, as from a link."""
        self.page.goto("about:blank")
        self.page.goto(f"{Path(path).as_uri()}#{fragment}")

    def opens(self, data, folder, fragment=""):
        """Open the page that is made with these data."""
        (folder / "page.html").write_text(page_text(data))
        self.goto(fragment, folder / "page.html")

    def app(self, expected):
        """A value of the page's own state."""
        return self.page.evaluate(f"(() => {{ const {{ app }} = rankmesh; return {expected}; }})()")

    def at(self, rank):
        """Where a rank is drawn, in pixels of the page."""
        found = self.app(f"app.stage.view.pointOf({rank})")
        return found["x"], found["y"]

    def pixel(self, rank):
        """The colour of the drawing a little inside a rank's cell, as red, green, blue."""
        x, y = self.at(rank)
        return self.page.evaluate(
            "([x, y]) => { const canvas = document.querySelector('canvas'), frame = canvas.getBoundingClientRect();"
            " const at = (value) => Math.round(value * devicePixelRatio);"
            " return [...canvas.getContext('2d').getImageData(at(x - frame.left), at(y - frame.top), 1, 1).data]"
            ".slice(0, 3); }",
            [x - 8, y - 9],
        )

    def text(self, selector):
        """What an element says."""
        return self.page.locator(selector).inner_text()


@pytest.fixture
def shown(browser):
    """A window of its own, which at the end has said nothing and asked for nothing but the file."""
    context = browser.new_context(viewport=WINDOW, permissions=["clipboard-read", "clipboard-write"])
    shown = Shown(context.new_page())
    shown.goto(f"spec={SPEC}")
    yield shown
    context.close()
    assert shown.messages == []
    assert [url for url in shown.asked if not re.match(r"(file|blob|about):", url)] == []


# -- the layout follows its controls ------------------------------------------------------------------------------


def _plan_is(shown, spec, **world):
    """The page shows the groups that Python makes of the SPEC."""
    ours = {name: groups.tolist() for name, groups in read(spec, **world).plan.kinds.items()}
    theirs = shown.app(
        "Object.fromEntries([...app.model.plan.kinds].map(([name, groups]) =>"
        " [name, Array.from({ length: groups.count }, (_, index) => groups.group(index))]))"
    )
    assert theirs == ours


def test_it_shows_what_it_is_given(shown):
    """The layout of the fragment: its SPEC, its kinds, its hosts, and the title."""
    assert shown.page.input_value("#spec-field") == SPEC
    assert SPEC in shown.page.title()
    assert "32 ranks on 4 hosts. Communicators: 13 a rank, 105 in the job." in shown.text(".controls")
    _plan_is(shown, SPEC)


def test_sizes_are_doubled_halved_and_written(shown):
    """Buttons, the keyboard and typing change a size; all else follows at once."""
    shown.page.get_by_role("button", name="double tp").click()
    _plan_is(shown, SPEC.replace("tp=2", "tp=4", 1))
    shown.page.get_by_role("button", name="halve tp").click()
    shown.page.get_by_role("button", name="halve cp").click()
    _plan_is(shown, SPEC.replace("cp=2", "cp=1"))
    shown.page.get_by_label("pp", exact=True).fill("4")
    _plan_is(shown, SPEC.replace("cp=2", "cp=1").replace("pp=2", "pp=4"))
    shown.page.get_by_label("ep", exact=True).press("ArrowDown")
    assert shown.page.input_value("#spec-field").endswith("ep=7,etp=1")


def test_each_size_of_megatron_is_a_control(shown):
    """A size that is written makes the layout that Python makes of it, or the words of Python's error."""
    for argument in ("world", "tp", "cp", "dp", "pp", "ep", "etp"):
        shown.goto(f"spec={SPEC}")
        shown.page.get_by_label(argument, exact=True).fill("4")
        spec = shown.page.input_value("#spec-field")
        assert f"{argument}=4" in spec
        try:
            _plan_is(shown, spec)
            refused = []
        except ValueError as error:
            refused = [str(error)]
        assert shown.page.locator("#spec-error").all_inner_texts() == refused


def test_what_cannot_be_says_why(shown):
    """An error in Python's words; the last valid layout stays."""
    shown.page.get_by_label("tp", exact=True).fill("5")
    with pytest.raises(ValueError, match="does not divide it") as refused:
        read(SPEC.replace("tp=2", "tp=5"))
    assert shown.text("#spec-error") == str(refused.value)
    assert "This is the last valid layout." in shown.text(".controls")
    _plan_is(shown, SPEC)


def test_the_order_is_a_control(shown):
    """An axis of the order moves up; the groups are Python's for that order."""
    shown.page.get_by_role("button", name="cp earlier in order").click()
    assert shown.page.input_value("#spec-field") == f"{SPEC},order=cp-tp-ep-dp-pp"
    _plan_is(shown, f"{SPEC},order=cp-tp-ep-dp-pp")


def test_axes_are_sized_moved_added_and_removed(shown):
    """A layout of axes with a view of the experts, which follows the mesh."""
    page = shown.page
    page.fill("#spec-field", "tp=2,dp=4,pp=2")
    page.get_by_role("button", name="Add a view for experts").click()
    _plan_is(shown, "tp=2,dp=4,pp=2/expert:ep=2,edp=4,pp=2")
    page.get_by_role("button", name="double pp", exact=True).click()
    _plan_is(shown, "tp=2,dp=4,pp=4/expert:ep=2,edp=4,pp=4")
    page.get_by_role("button", name="double ep in expert").click()
    _plan_is(shown, "tp=2,dp=4,pp=4/expert:ep=4,edp=2,pp=4")
    page.get_by_role("button", name="dp earlier", exact=True).click()
    _plan_is(shown, "dp=4,tp=2,pp=4/expert:ep=4,edp=2,pp=4")
    page.get_by_label("name of an axis to add", exact=True).fill("cp")
    page.get_by_label("name of an axis to add", exact=True).press("Enter")
    assert page.input_value("#spec-field").startswith("dp=4,tp=2,pp=4,cp=2/")
    page.get_by_role("button", name="remove cp", exact=True).click()
    _plan_is(shown, "dp=4,tp=2,pp=4/expert:ep=4,edp=2,pp=4")


def test_a_star_takes_the_world(shown):
    """A size that is left open is filled from the world, which is then a control."""
    shown.page.fill("#spec-field", "tp=2,dp=*")
    assert "dp=* cannot be inferred without world_size" in shown.text("#spec-error")
    shown.page.get_by_label("world", exact=True).fill("12")
    _plan_is(shown, "tp=2,dp=*", world_size=12)


def test_the_machine_is_a_control(shown):
    """Devices a host, a level more, its size, and away with it."""
    page = shown.page
    page.get_by_label("host", exact=True).fill("4")
    assert "on 8 hosts" in shown.text(".controls")
    page.get_by_role("button", name="Add a level: nvlink").click()
    page.get_by_label("nvlink of hosts", exact=True).fill("2")
    page.get_by_role("button", name="Add a level: leaf").click()
    assert shown.app("app.state.cluster") == "host=4,nvlink=2,leaf=*"
    assert shown.app("app.model.cluster.toString()") == "32 devices, 8 hosts of 4, levels host nvlink leaf"
    page.get_by_role("button", name="remove leaf in machine").click()
    assert "rank 31 has no device: the cluster has 8 devices" in shown.text("#spec-error")


def test_another_family_keeps_the_sizes(shown):
    """Axes, or the groups of another framework, with the sizes that both know; a published layout has its own."""
    shown.page.get_by_label("Framework").select_option("axes")
    _plan_is(shown, "tp=2,cp=2,dp=4,pp=2")
    shown.page.get_by_label("Framework").select_option("nanotron")
    _plan_is(shown, "nanotron:world=32,tp=2,cp=2,pp=2")
    shown.page.get_by_label("Preset").select_option("llama3-405b")
    assert "16,384 ranks on 2,048 hosts" in shown.text(".controls")
    assert shown.page.input_value("#spec-field") == "llama3-405b"


# -- pointing, pinning, finding, comparing ------------------------------------------------------------------------


def test_pointing_shows_all_groups_of_a_rank(shown):
    """The coordinate in each view, each group and its neighbours, what crosses hosts; colours until it points away."""
    before = shown.pixel(5)
    shown.page.mouse.move(*shown.at(13))
    card = shown.text(".card >> nth=0")
    assert "Rank 13 on node1" in card
    assert "13 = tp 1·1 + cp 0·2 + dp 3·4 + pp 0·16" in card
    local = read_plan(SPEC).of(13)
    rows = {row.split("\n")[0]: row for row in re.findall(r"^\w+\t.*$", card, re.MULTILINE)}
    dp = next(row for row in rows if row.startswith("dp\t")).split("\t")
    assert dp[1:4] == [f"{local['dp'].rank + 1} of 4", "9", "1"]
    assert dp[4] == "network"
    assert str(list(local["dp"].ranks)) in card
    assert shown.pixel(5) != before
    assert shown.pixel(2) == [255, 255, 255]
    assert "rank 13 on node1: tp 1, cp 0, dp 3, pp 0" in shown.text(".legend")
    shown.page.mouse.move(700, 40)
    assert shown.pixel(5) == before


def test_choosing_a_kind_colours_its_groups(shown):
    """Two ranks have one colour when they are in one group; the card says what it shares and what it crosses."""
    shown.page.get_by_role("button", name="ep_dp", exact=True).click()
    groups = read_plan(SPEC).groups("ep_dp")
    colours = {rank: tuple(shown.pixel(rank)) for rank in range(32)}
    assert all(colours[one] == colours[other] for one, other in groups.tolist())
    assert len(set(colours.values())) == len(groups)
    card = shown.text(".card >> nth=-1")
    assert "16 of 2 ranks" in card
    assert "intra_ep_dp" in card
    assert "16 within one network" in card
    shown.page.get_by_label("Colour by").select_option("tp")
    assert "16 within one host" in shown.text(".card >> nth=-1")


def test_two_pins_say_what_they_share(shown):
    """A click pins, the second says the shared kinds and the level; a third takes the first one's place."""
    for rank in (0, 4):
        shown.page.mouse.click(*shown.at(rank))
    shown.page.mouse.move(700, 40)
    plan = read_plan(SPEC)
    shared = [name for name, groups in plan.kinds.items() if groups.size > 1 and groups.has(0) and 4 in groups.of(0)]
    assert f"They share a group of {len(shared)} of the {len(plan.specs)} kinds: {', '.join(shared)}." in shown.text(
        ".inspector"
    )
    assert "They are on the same host." in shown.text(".inspector")
    shown.page.mouse.click(*shown.at(16))
    assert shown.app("app.pins") == [4, 16]
    assert "the innermost level that contains both is network" in shown.text(".inspector")
    shown.page.get_by_role("button", name="Unpin").click()
    assert shown.app("app.pins") == []


def test_a_pinned_rank_keeps_its_groups(shown):
    """After a click the panel and the drawing stay on the pinned rank, except while another is pointed at."""
    shown.page.mouse.click(*shown.at(13))
    pointed = shown.text(".card >> nth=0")
    shown.page.mouse.move(700, 40)
    assert "Rank 13 on node1" in pointed
    assert shown.text(".card >> nth=0") == pointed
    assert shown.pixel(2) == [255, 255, 255]
    shown.page.mouse.move(*shown.at(2))
    assert "Rank 2 on node0" in shown.text(".card >> nth=0")
    shown.page.mouse.click(*shown.at(4))
    shown.page.mouse.move(700, 40)
    assert "Rank 4 on node0" in shown.text(".card >> nth=0")
    shown.page.get_by_role("button", name="Unpin").click()
    assert "Point at a rank" in shown.text(".card >> nth=0")


def test_a_search_colours_its_ranks_beside_a_pin(shown):
    """What a search finds is coloured on the drawing while the panel keeps the pinned rank."""
    shown.page.mouse.click(*shown.at(13))
    shown.page.mouse.move(700, 40)
    shown.page.fill("#search", "node3")
    shown.page.press("#search", "Enter")
    assert "Rank 13" in shown.text(".card >> nth=0")
    assert "8 ranks found" in shown.text(".legend")
    assert shown.pixel(24) == shown.pixel(31) != shown.pixel(0)


def test_a_tap_lists_the_groups(browser):
    """On a phone a tap shows what hovering shows: the rank's groups in the panel, and their colours."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    shown = Shown(context.new_page())
    shown.goto(f"spec={SPEC}")
    shown.page.touchscreen.tap(*shown.at(13))
    shown.page.wait_for_function("rankmesh.app.pins.length === 1")
    card = shown.text(".card >> nth=0")
    assert "Rank 13 on node1" in card
    assert all(str(list(groups.ranks)) in card for groups in map(read_plan(SPEC).of(13).get, ("tp", "dp", "pp")))
    assert "rank 13 on node1" in shown.text(".legend")
    context.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_chosen_toggle_is_readable_under_the_pointer(shown, theme):
    """A button that is pressed keeps its contrast while the pointer is over it."""
    shown.goto(f"theme={theme}")
    for name in ("Drawing", "Hosts", "tp"):
        button = shown.page.get_by_role("button", name=name, exact=True)
        assert button.get_attribute("aria-pressed") == "true"
        button.hover()
        text, ground = button.evaluate(
            "(element) => { const seen = (each) => { const { backgroundColor } = getComputedStyle(each);"
            " return backgroundColor === 'rgba(0, 0, 0, 0)' ? seen(each.parentElement) : backgroundColor; };"
            " return [getComputedStyle(element).color, seen(element)]; }"
        )
        assert _contrast(text, ground) >= 4.5, name


LONG = (
    "encoder_tensor_parallel=2,context_parallel_ring=2,data_parallel_replicate_across_availability_zones=4,pipeline=2"
    "/experts:expert_tensor_parallel=2,expert_parallel_all_to_all=4,expert_data_parallel=2,pipeline=2"
)
# What reaches beyond the inner edge of its panel, but for what is cut there and what is not seen.
OUTSIDE = """() => [...document.querySelectorAll('.controls, .inspector')].flatMap((panel) => {
  const { right } = panel.getBoundingClientRect(), style = getComputedStyle(panel);
  const edge = right - parseFloat(style.paddingRight) - (panel.offsetWidth - panel.clientWidth) + 1;
  return [...panel.querySelectorAll('*:not(.unseen, .unseen *)')]
    .filter((each) => each.getBoundingClientRect().right > edge)
    .map((each) => `${panel.className}: ${each.tagName}.${each.className} ${each.textContent.slice(0, 40)}`);
})"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fragment",
    [
        f"spec={SPEC}&pins=3,29",
        f"spec={LONG}&rank=13&pins=3,29",
        f"spec={LONG}&cluster=host=4,nvlink_domain_of_racks=2,leaf=*&rank=13&compare=tp=32",
        f"{WORLDS['131072']}&rank=77777&pins=3,131071",
    ],
)
def test_everything_stays_inside_its_panel(shown, fragment):
    """At a width of 1400 pixels no chip, name, button or figure reaches beyond its panel."""
    shown.page.set_viewport_size({"width": 1400, "height": 900})
    shown.goto(fragment)
    shown.page.locator(".inspector summary").click()
    assert shown.page.evaluate(OUTSIDE) == []


def test_search_finds_a_rank_a_coordinate_and_a_host(shown):
    """A number goes to the rank; a coordinate and a host colour all that match; nonsense is told."""

    def find(text):
        shown.page.fill("#search", text)
        shown.page.press("#search", "Enter")
        return shown.text(".search .note")

    assert find("13") == "rank 13"
    assert "Rank 13" in shown.text(".inspector")
    assert find("tp=1,dp=3") == "tp=1, dp=3: 4 ranks"
    assert shown.app("app.found") == [rank for rank in range(32) if rank % 2 == 1 and rank // 4 % 4 == 3]
    assert find("edp 1") == "edp=1: 16 ranks"
    assert find("node3") == "host node3: 8 ranks"
    assert find("99") == "there is no rank 99; ranks go from 0 to 31"
    assert "positions go from 0 to 1" in find("tp=7")
    assert "the axes are tp, cp, dp, pp" in find("xp=1")


def test_search_comes_near_in_a_large_world(shown):
    """A square stands for many ranks, as the legend says; a rank that is too small to be seen is brought near."""
    shown.goto(WORLDS["131072"])
    shown.page.wait_for_function("rankmesh.app.stage.view.took.rectangles > 0")
    assert re.search(r"each square stands for the \d+ ranks of one \w+", shown.text(".legend"))
    shown.page.fill("#search", "77777")
    shown.page.press("#search", "Enter")
    x, y = shown.at(77777)
    assert 264 < x < 1092
    assert 90 < y < 860
    shown.page.mouse.move(x, y)
    assert "Rank 77,777" in shown.text(".inspector")


def test_comparing_says_what_changed(shown):
    """A second layout beside the first: kinds and ranks that differ, a mark on them, both pointed at together."""
    shown.page.get_by_role("button", name="Compare").click()
    shown.page.fill("#compare-field", SPEC.replace("tp=2", "tp=4").replace("cp=2", "cp=1"))
    assert shown.page.locator(".pane:visible").count() == 2
    output = shown.text(".inspector")
    assert "tp 2 by 1 → 4 by 1" in output
    assert re.search(r"^tp\t32\t2 → 4$", output, re.MULTILINE)
    shown.page.fill("#compare-field", "megatron:world=33,tp=2")
    assert "does not divide it" in shown.text("#compare-error")
    shown.page.get_by_role("button", name="End comparison").click()
    assert shown.page.locator(".pane:visible").count() == 1


# -- links, copies, files, paper ----------------------------------------------------------------------------------


def test_a_link_is_the_state(shown):
    """What the address says opens the same page again: layout, machine, kind, arrangement, pins, comparison, light."""
    page = shown.page
    page.get_by_label("ep", exact=True).fill("4")
    page.get_by_label("Colour by").select_option("ep")
    page.get_by_role("button", name="Mesh", exact=True).click()
    page.mouse.click(*shown.at(3))
    page.get_by_role("button", name="Dark").click()
    page.get_by_role("button", name="Compare").click()
    state, link = shown.app("app.state"), page.url
    shown.goto(link.partition("#")[2])
    assert shown.app("app.state") == state
    assert state["pins"] == [3]
    page.evaluate("location.hash = 'spec=tp=2,dp=2'")
    page.wait_for_function("rankmesh.app.state.spec === 'tp=2,dp=2'")
    _plan_is(shown, "tp=2,dp=2")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        "megatron:world=32,tp=2,pp=2,order=tp-cp-ep-pp-dp,optimizer_instances=2",
        "tp=2,cp=2,dp=2,pp=2",
        "tp=2,dp=4,pp=2/expert:etp=1,ep=4,edp=2,pp=2",
        "deepseek-v3",
        "nanotron:tp=2,dp=4",
    ],
)
def test_copies_make_the_same_plan(shown, spec, tmp_path):
    """As SPEC, as Python and as Megatron's arguments: each is run by Python, and makes these groups."""
    shown.goto(f"spec={spec}")

    def copied(label):
        shown.page.locator(".menu summary").click()
        shown.page.get_by_role("button", name=label).click()
        text = shown.page.get_by_role("dialog").get_by_role("textbox")
        output = text.input_value() if text.count() else None
        expected = shown.text("dialog [role=status]")
        shown.page.get_by_role("button", name="Close").click()
        return output, expected

    plan = read(spec).plan
    assert read(copied("Copy as SPEC")[0]).plan == plan
    names = {}
    exec(copied("Copy as Python")[0], names)  # noqa: S102  - the page's own words
    assert names["plan"] == plan
    script, expected = copied("Copy as Megatron arguments")
    if spec.startswith("nanotron"):
        assert expected == "the groups of a nanotron layout are not Megatron's; write it as megatron:world=..."
    else:
        (tmp_path / "train.sh").write_text(f"#!/bin/bash\n{script}\n")
        mesh = read(tmp_path / "train.sh").plan.mesh
        local = {"tp", "cp", "dp", "pp"} & {*plan.mesh.axes}
        assert all(mesh.groups(name) == plan.mesh.groups(name) for name in local)
        if plan.mesh.views:
            assert mesh.groups("ep", view="expert") == plan.mesh.groups("ep", view="expert")
    link = copied("Copy link")[0]
    shown.goto(link.partition("#")[2])
    assert shown.page.input_value("#spec-field") == spec


def test_the_picture_is_saved(shown, tmp_path):
    """SVG with every rank as text, and a PNG of twice the size of the drawing."""

    def saved(label):
        shown.page.locator(".menu summary").click()
        with shown.page.expect_download() as download:
            shown.page.get_by_role("button", name=label).click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        return path

    svg = saved("Save the picture as SVG").read_text()
    assert all(f">{rank}</text>" in svg for rank in range(32))
    assert "node3" in svg
    png = saved("Save the picture as PNG").read_bytes()
    size = shown.page.locator(".view").first.bounding_box()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == round(size["width"]) * 2


def test_it_prints_the_picture_and_the_kinds(shown):
    """On paper there are the drawing and two tables, and no control."""
    shown.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown.page.emulate_media(media="print")
    assert not shown.page.locator("#app").is_visible()
    assert shown.page.locator("#print svg").is_visible()
    assert "intra_dist_opt_instance" in shown.text("#print")


# -- for everyone -------------------------------------------------------------------------------------------------


def test_the_keyboard_alone_does_it_all(shown):
    """Tab to the drawing, walk with the arrows, pin two, zoom, let go: with words for those who do not see it."""
    page = shown.page
    page.keyboard.press("Tab")
    for _ in range(80):
        if page.evaluate("document.activeElement.classList.contains('view')"):
            break
        page.keyboard.press("Tab")
    else:
        pytest.fail("the drawing cannot be reached with Tab")
    page.keyboard.press("Home")
    assert shown.app("app.rank") == 0
    page.keyboard.press("ArrowRight")
    assert shown.app("app.rank") == 1
    assert shown.text("[role=status]") == "rank 1 on node0: tp 1, cp 0, dp 0, pp 0"
    page.keyboard.press("ArrowDown")
    assert shown.app("app.rank") == 5
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert shown.app("app.pins") == [5, 31]
    before = shown.at(31)
    page.keyboard.press("+")
    page.wait_for_function("rankmesh.app.stage.view.pointOf(31)")
    assert shown.at(31) != before
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    assert (shown.app("app.rank"), shown.app("app.pins")) == (None, [])


def test_the_arrows_reach_every_rank(shown):
    """From the first rank, in each arrangement, the arrows lead to all others."""
    for arrange in ("places", "mesh"):
        shown.goto(f"spec=tp=2,cp=2,dp=3,pp=2&cluster=4&arrange={arrange}")
        reached = shown.page.evaluate(
            "() => { const view = document.querySelector('.view'), seen = new Set(), open = [0], { app } = rankmesh;"
            " while (open.length) { const rank = open.pop(); if (seen.has(rank)) continue; seen.add(rank);"
            " for (const key of ['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown']) { app.set({ rank });"
            " view.dispatchEvent(new KeyboardEvent('keydown', { key })); open.push(app.rank); } }"
            " return [...seen].sort((a, b) => a - b); }"
        )
        assert reached == list(range(24))


def test_tables_say_everything(shown):
    """Axes, kinds, groups, ranks and hosts as tables with captions, long ones by pages."""
    page = shown.page
    page.get_by_role("button", name="Tables").click()
    captions = page.locator(".tables caption").all_inner_texts()
    assert captions == ["Axes", "Kinds of group", "Groups of tp", "Ranks", "4 hosts"]
    kinds = page.get_by_role("table", name="Kinds of group", exact=True).inner_text()
    assert re.search(r"^dp_cp\tdp-cp\t\t4\t8\t.*\town\t4\t2\t2\tnetwork$", kinds, re.MULTILINE)
    assert "[14, 15]" in page.get_by_role("table", name="Groups of tp").inner_text()
    page.fill("#spec-field", "dp=1000")
    page.get_by_role("button", name="Last").first.click()
    assert "rank 999" in page.get_by_role("table", name="Ranks").inner_text()


def _axe(page, where="html"):
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    found = page.evaluate("([where, rules]) => axe.run(where, rules)", [where, rules])
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "fragment",
    [
        f"spec={SPEC}&rank=13&pins=3,29",
        f"spec={SPEC}&tab=table",
        "spec=tp=2,dp=5&cluster=4&compare=tp=5,dp=2",
        "spec=tp=0",
        "spec=tp=2,dp=4/expert:ep=8&arrange=mesh",
        f"spec={SPEC}&embed=1",
    ],
)
def test_axe_finds_nothing(shown, fragment, theme):
    """WCAG 2.2 AA and good practice, in light and in dark: no violation."""
    shown.goto(f"{fragment}&theme={theme}")
    assert _axe(shown.page) == []
    if "embed" not in fragment:
        shown.page.locator(".menu summary").click()
        assert _axe(shown.page, ".menu") == []


# Text on what is drawn, which axe does not see: pairs of colours, the second a list or one.
PAIRS = """() => { const { colours } = rankmesh.app, parts = [0, 0.25, 0.5, 0.75, 1]; return [
  [colours.ink, colours.groups], [colours.ink, colours.place], [colours.ink, [colours.waits]],
  [colours.ink, parts.map(colours.scale)], [colours.onKind, colours.kinds], [colours.onKind, [colours.cause]],
  [colours.soft, [colours.cell, colours.place[1]]], [colours.onFocus, [colours.focus]]]; }"""


def _linear(colour):
    """Red, green and blue of a colour #rrggbb or rgb(...), as much light as each is."""
    numbers = re.findall(r"\d+", colour) if colour.startswith("rgb") else bytes.fromhex(colour[1:])
    parts = [int(number) / 255 for number in numbers]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(linear):
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    """The ratio of WCAG 2.2 of two colours."""
    bright, dark = sorted((_luminance(_linear(one)), _luminance(_linear(other))), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.few(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_drawing_has_contrast(shown, theme):
    """Text on every colour of the drawing has 4.5 to 1, in light and in dark."""
    shown.goto(f"theme={theme}")
    pairs = [(text, ground) for text, grounds in shown.page.evaluate(PAIRS) for ground in grounds]
    assert [(*pair, _contrast(*pair)) for pair in pairs if _contrast(*pair) < 4.5] == []


def test_a_narrow_screen_has_it_all(shown):
    """On a telephone the SPEC is whole, the controls are above the drawing, and nothing is wider than the screen."""
    shown.page.set_viewport_size({"width": 390, "height": 844})
    shown.page.fill("#spec-field", LONG)
    assert shown.app("app.state.spec") == LONG
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    field = shown.page.evaluate(
        "(({scrollWidth, clientWidth, scrollHeight, clientHeight}) => "
        "[scrollWidth <= clientWidth, scrollHeight <= clientHeight])(document.querySelector('#spec-field'))"
    )
    assert field == [True, True]
    size = shown.page.locator(".controls [aria-label^='double ']").first
    size.wait_for(state="hidden")
    shown.page.get_by_text("Sizes, order, machine").click()
    size.wait_for()
    top = {part: shown.page.locator(part).bounding_box()["y"] for part in (".top", ".controls", ".stage", ".inspector")}
    assert list(top) == sorted(top, key=top.__getitem__)
    assert _axe(shown.page) == []
    shown.page.get_by_text("Sizes, order, machine").click()
    shown.page.set_viewport_size(WINDOW)
    size.wait_for()  # it opens where there is room


# -- what came with the page --------------------------------------------------------------------------------------


def test_a_saved_plan_comes_with_the_page(shown, tmp_path):
    """A plan that no SPEC says, with a rank map, is drawn as it was saved."""
    plan = read("tp=2,dp=4").plan.replace(rank_map=(0, 4, 1, 5, 2, 6, 3, 7))
    saved = tmp_path / "plan.json"
    saved.write_text(plan.to_json())
    shown.opens(explored(saved), tmp_path)
    assert shown.app("[...app.model.plan.kinds.get('tp').array()]") == plan.groups("tp").array.reshape(-1).tolist()
    assert shown.app("app.state.spec") == "given"


def test_a_measurement_is_drawn(shown, tmp_path):
    """Groups by their bandwidth, the slow one pale, with figures and slow hosts."""
    plan = read("tp=2,dp=4").plan
    rows = []
    for name in ("tp", "dp"):
        groups = plan.groups(name)
        slowest = {"ranks": list(groups[0]), "hosts": ["node0"]}
        row = {"name": name, "collective": "all-reduce", "bytes": 4096, "seconds": 2e-3, "busbw": 1e9}
        rows.append({**row, "slowest": slowest, "groups": [2e-3] + [1e-3] * (len(groups) - 1)})
    data = tmp_path / "measured.json"
    data.write_text(json.dumps({"backend": "gloo", "kinds": rows, "slow_hosts": ["node0"]}))
    shown.opens(explored("tp=2,dp=4", measured=data), tmp_path, "kind=tp")
    assert shown.pixel(0) == shown.pixel(1) != shown.pixel(2) == shown.pixel(3) == shown.pixel(7)
    assert "1 GB/s to 2 GB/s of bus bandwidth, all groups at once (gloo). Slow hosts: node0." in shown.text(
        ".inspector"
    )


def test_a_hang_is_drawn(shown, tmp_path):
    """The rank that is named, those that wait, and the verdict; of a call that all have entered nobody is missing."""
    data = explored("tp=2,dp=2", recordings=RECORDINGS / "skips_a_call")
    data["hang"]["turns"] = [{"call": "all_reduce", "waiting": [0, 2], "missing": missing} for missing in ([], [1])]
    shown.opens(data, tmp_path)
    text = shown.text(".inspector")
    assert data["hang"]["verdict"] in text
    assert "all_reduce: 0, 2 in it, as all members" in text
    assert "all_reduce: 0, 2 for 1" in text
    (cause, *_), waiting = data["hang"]["causes"], data["hang"]["waiting"]
    colours = {rank: tuple(shown.pixel(rank)) for rank in range(4)}
    assert colours[cause["ranks"][0]] not in [colours[rank] for rank in waiting if rank not in cause["ranks"]]
    assert len({colours[rank] for rank in waiting if rank not in cause["ranks"]}) == 1


def test_a_slow_job_is_drawn(shown, tmp_path):
    """Each rank by the seconds that others wait for it, in a few colours, with a legend and what is slow."""
    report(16, replace(LATE, ranks=(13,))).write(tmp_path)
    data = explored("tp=2,dp=8", recordings=tmp_path)
    shown.opens(data, tmp_path)
    assert (data["state"]["overlay"], shown.app("app.state.overlay")) == ("slow", "slow")
    pixels = [tuple(shown.pixel(rank)) for rank in range(16)]
    assert {rank for rank in range(16) if pixels[rank] != pixels[0]} == {13}
    assert "rank 13 (host node1) makes dp wait: 84 ms of each step of 610 ms (14 %)" in shown.text(".inspector")
    assert "others wait for it" in shown.text(".legend")
    shown.page.get_by_role("button", name="groups", exact=True).click()
    assert len({tuple(shown.pixel(rank)) for rank in range(16)}) > 2


# Red, green and blue, linear, as people see them without a kind of cones (Machado and others, 2009), or with all.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_seconds_differ_in_lightness(shown, theme, sight):
    """Each colour is at least 12 of 100 further from the paper than the one before, whichever cones an eye has."""
    shown.goto(f"theme={theme}")

    def lightness(text):
        linear = _linear(text)
        seen = [max(0, sum(weight * part for weight, part in zip(row, linear, strict=True))) for row in SIGHTS[sight]]
        luminance = _luminance(seen)
        return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance

    steps = [lightness(colour) for colour in shown.app("app.colours.heat")]
    sign = -1 if theme == "light" else 1
    assert min(sign * (after - before) for before, after in pairwise(steps)) >= 12


# -- large worlds -------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_gesture_costs_what_its_pixels_cost(shown, name, record_property):
    """Whatever the world: thousands of rectangles, hundreds of elements."""
    costs = gestures(shown.page, WORLDS[name])
    record_property("milliseconds, rectangles, elements", costs)
    assert {gesture: cost for gesture, cost in costs.items() if max(row[1] for row in cost) > 40_000} == {}
    assert {gesture: cost for gesture, cost in costs.items() if max(row[2] for row in cost) > 2_000} == {}
    assert min(row[1] for row in costs["arrange"]) > 1_000  # it is drawn at all
