"""`loops.check` and `sinkscope loops`: planted loops against what surrounds them, and calls that make no sense."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from loop_texts import prose, rows_of
from repository import python

from sinkscope.loops import LoopCheck, check
from sinkscope.loops.text.outputs import is_lone, split


@pytest.mark.parametrize("row", rows_of("verdicts.jsonl"))
def test_row_conclusion_code_and_json_say_the_same(row, tmp_path, monkeypatch, typed):
    """Each part of a text is repeated, with a number in place of {i}."""
    verdict, texts = row["verdict"], [part.replace("{i}", str(i)) for part, *ends in row["parts"] for i in range(*ends)]
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("".join(texts))
    looping = verdict in ("loops", "looped")
    out = typed("loops x.txt --json x.json", 3 if looping else 0).out
    assert re.search(rf"x\.txt +{verdict} ", out) and ("\nTry: " in out) == looping
    (record,) = LoopCheck.load("x.json").records
    if verdict == "loops" and record.period is not None:
        repeated = record.wasted + record.period
        assert record.tokens - record.onset - 48 <= repeated <= record.tokens
        assert f"Conclusion: x.txt loops: found at token {record.detected}, since token {record.onset}" in out
    assert record.verdict == verdict


@pytest.mark.parametrize("sign", "─═=-*#~_.·•■")
@pytest.mark.parametrize("title", ["Results\n", "Here it is.\n\n", "", "Two words "])
def test_rules_do_not_count(sign, title):
    for length in (100, 192, 400):
        assert check(f"{title}{sign * length}{END}").records[0].verdict in ("clean", "suspicious"), length


def test_images_do_not_count_and_letters_do():
    image = f"![](data:image/png;base64,iVBORw0KGgo{'A' * 4000}=)"
    (found,) = check(f"{image} and {image}{END}").records
    assert found.verdict == "clean" and found.tokens < 60
    for word in ("ha", "!", "😂", "the ", "A"):
        assert check(word * 9000).records[0].verdict == "loops"


@pytest.mark.parametrize(
    "item",
    [
        "{}. Grapefruit ",
        "{}) plum\n",
        "{}. Positive\n",
        "{}. C\n",
        "Q{}: C\n",
        "({}) yes\n",
        "[{}] Positive.\n",
        "#{} yes\n",
        "{}: ok\n",
        "{} - Positive\n",
        "Line {}: no errors found.\n",
    ],
)
@pytest.mark.parametrize(
    ("prompt", "verdict"),
    [
        ("", "suspicious"),
        ("Why is the sky blue?", "loops"),
        ("Are these 60 reviews positive?", "suspicious"),
        ("Is it an error?\n" + "a line\n" * 60, "suspicious"),
        ("Name twelve fruits.", "loops"),
    ],
)
def test_a_list_of_equal_answers_is_a_loop_only_if_it_was_not_asked_for(item, prompt, verdict):
    """In any form of its numbers, from twelve items and 64 tokens on."""
    text = "".join(item.format(number) for number in range(9, 60))
    (found,) = check(text, prompt=prompt).records
    assert found.verdict == verdict
    if verdict == "loops":
        tokens = len(split(text))
        assert found.detected <= max(80, 13 * tokens / 51 + 1)


@pytest.mark.parametrize("item", ["A: {}\n", "A,{},free\n", "| {} | yes |\n", '{{"id": {}}}\n'])
def test_values_cells_and_records_are_no_list(item):
    text = "".join(item.format(number) for number in range(9, 40))
    assert check(text, prompt="Which seats are free?").records[0].verdict in ("clean", "suspicious")


END = "\nAll twelve checks passed, and nothing is left to do.\n"
WORDS = prose(400).split()
BRANCHES = [f'    elif x == "{word}{n}":\n        return "{WORDS[-n]}{n}"\n' for n, word in enumerate(WORDS)]
DOUBTFUL = {
    "chapters": "".join(f"Chapter {n} {'.' * 60} {7 * n}\n" for n in range(1, 30)),
    "a ladder with other words in each branch": f"    if not x:\n        return 0\n{''.join(BRANCHES[:60])}",
    "a ladder in braces": "".join(f"}} else if (x.{word}()) {{\n  {word}(y);\n" for word in WORDS[:60]),
    "one word 30 times": f"{prose(60)} {'the ' * 30}",
    "a block of 200 tokens, twice": f"{prose(180)} " * 2,
    "a paragraph in which words are exchanged": " ".join(
        f"The {'old' if n % 3 else 'grey'} dog {'ran' if n % 2 else 'went'} home, {'then' if n % 5 else 'so'} it slept."
        for n in range(40)
    ),
    "short lines in any order": "".join(f"{('OK.', 'Done.', 'Yes.', 'Sure.')[n * n % 7 % 4]}\n" for n in range(120)),
    "a cycle of 3,300 words": "".join(f"{prose(11, number)}.\n" for number in range(300)) * 3,
    "digits that are no numbers": ("cat \ncat \n² = " * 90)[:840],
    "few words in any order": " ".join(("the", "the the", "the,")[n * n % 7 % 3] for n in range(150)),
}


ROUNDS = {  # reasoning that goes round: what is the same in every sentence, and what is drawn for it
    "Chinese": ("不对，让我们{}这个{}第{}部分。", "重新计算 仔细分析 再次检查", "方程 结论 假设", "一 二 三 四"),
    "Japanese": (
        "いや、{}が{}かどうかを、ここで{}ましょう。",
        "かてい しき けつろん",
        "ただしい なりたつ",
        "みなおし たしかめ",
    ),
    "Korean": ("아니, {} 단계의 {}이 {}지 또 살펴보자. ", "첫째 둘째 셋째", "값 식 계산", "맞는 옳은 틀린"),
    "Thai": ("ไม่ใช่ลองกลับไป{}{}ใน{}อีกหน ", "พิจารณา คำนวณ ทบทวน", "ค่าตัวแปร ผลรวม", "บรรทัดแรก ข้อสอง สมการ"),
    "two words": ("{}", "苹果 香蕉"),
    "two words in Thai": ("{}", "กล้วย แอปเปิล"),
}
HONEST_LONE = {
    "kana": (
        "むかしむかし、あるところに、おじいさんとおばあさんがすんでいました。おじいさんはやまへしばかりに、おばあさんはかわへ"
        "せんたくにいきました。おばあさんがかわでせんたくをしていると、おおきなももがどんぶらこ、どんぶらことながれてきました。"
        "「これはよいおみやげになるわ」おばあさんはももをひろいあげて、いえにもちかえりました。ふたりがももをたべようときって"
        "みると、なんとなかからげんきなおとこのあかちゃんがとびだしてきました。こどものいなかったふたりはたいそうよろこんで、"
        "ももたろうとなづけました。ももたろうはすくすくとそだって、やがてつよいわかものになりました。あるひ、むらをあらすおにを"
        "たいじしにいくことにきめ、きびだんごをこしにつけてたびにでかけました。とちゅうでいぬとさるときじにであい、だんごをわけて"
        "なかまにしました。ふねでしまにわたると、おにたちはさかもりのさいちゅうでした。ももたろうたちはちからをあわせてたたかい、"
        "たからものをくるまにつんでかえりました。はるになるとのはらにすみれがさき、ちょうがひらひらまいます。なつのよるは"
        "ほたるをおってこどもらがはしり、かえるのうたがきこえます。あきにはくりやまつたけをひろい、ゆうやけぞらをからすがとんで"
        "ゆきます。ふゆ、ゆきのつもったあさ、ねこはこたつでまるくなり、とうさんはまきをわってふろをわかしてくれました。えきまえの"
        "ほんやでえほんをえらび、ぱんやであまいめろんぱんをふたつかってから、でんしゃにのってびょういんのそぼをみまいにいった。"
        "どうぶつえんではぞうがはなでみずをまき、ぺんぎんがよちよちあるいて、きりんはたかいきのはをむしゃむしゃたべていたよ。"
        "やまのうえのちいさなてらでは、おしょうさんがあさはやくからにわをはいている。となりのむすめはぴあのをならい、おとうとは"
        "やきゅうにむちゅうだ。たいふうがきたばんにろうそくをともし、らじおのにゅーすをきいた。にちようびにはかぞくそろって"
        "うみへつりにでかけ、べんとうにはたまごやきとうめぼしのおにぎりがはいっていた。"
    ),
    "Thai": (
        "ประเทศไทยตั้งอยู่ในเอเชียตะวันออกเฉียงใต้ มีเมืองหลวงคือกรุงเทพมหานคร ภาคเหนือเป็นภูเขาสูงสลับหุบเขา อากาศเย็นสบายในฤดูหนาว "
        "ส่วนภาคใต้ติดทะเลทั้งสองฝั่ง ชาวบ้านทำประมงและปลูกยางพารา อาหารขึ้นชื่อได้แก่ต้มยำกุ้ง ผัดไทย และข้าวเหนียวมะม่วง "
        "นักท่องเที่ยวจากทั่วโลกมาเยี่ยมชมวัดเก่าแก่ ตลาดน้ำ และหาดทรายขาวทุกปี ภาษาราชการใช้อักษรที่พ่อขุนรามคำแหงประดิษฐ์ขึ้น "
        "เศรษฐกิจพึ่งพาการส่งออกรถยนต์ เครื่องใช้ไฟฟ้า ข้าวสาร รวมถึงผลไม้เมืองร้อนหลายชนิด เด็กเรียนหนังสือฟรีสิบห้าปี "
        "เทศกาลสงกรานต์จัดช่วงเดือนเมษายน ผู้คนสาดน้ำใส่กันเพื่อคลายร้อนแล้วขอพรผู้ใหญ่ หลังฤดูฝนจึงถึงวันลอยกระทงริมแม่น้ำ "
        "รถไฟสายแรกเปิดเดินระหว่างพระนครกับอยุธยา ปัจจุบันกำลังก่อสร้างทางคู่และรถความเร็วสูงเชื่อมประเทศเพื่อนบ้าน "
        "แม่ของฉันชอบทำแกงเขียวหวานใส่มะเขือเปราะ พ่อเลี้ยงปลากัดไว้หลังบ้าน น้องสาวกำลังหัดขี่จักรยานไปโรงเรียนทุกเช้า "
        "ห้องสมุดแห่งใหม่เปิดให้ยืมนิยายแปล วารสารวิทยาศาสตร์ และแผ่นเสียงโบราณโดยไม่คิดค่าธรรมเนียม "
    ),
}


@pytest.mark.parametrize("language", ROUNDS)
def test_reasoning_that_goes_round_is_suspicious_in_scripts_without_spaces(language):
    rng = random.Random(language)
    sentence, *words = ROUNDS[language]
    text = "".join(sentence.format(*(rng.choice(names.split()) for names in words)) for _ in range(200))
    assert check(text).records[0].verdict != "clean"


@pytest.mark.parametrize("language", HONEST_LONE)
def test_an_ordinary_text_in_few_letters_is_clean(language):
    """It uses nearly all letters of its script, again and again."""
    text = HONEST_LONE[language]
    assert check(text).records[0].verdict == "clean"
    assert sum(map(is_lone, split(text))) > 800 and len({*text}) < 100


def test_a_word_without_spaces_is_no_round_in_a_text_of_other_words():
    sentences = prose(2400).split(". ")
    assert check(". ".join(f"{sentence} (猫と犬)" for sentence in sentences)).records[0].verdict == "clean"


@pytest.mark.parametrize("name", DOUBTFUL)
def test_short_lines_and_far_cycles_are_suspicious_at_least(name):
    assert check(DOUBTFUL[name]).records[0].verdict in ("suspicious", "loops")[: 1 if name == "chapters" else 2]
    assert check("".join(BRANCHES[:42])).records[0].verdict == "clean", "as many branches as people write"


def test_what_was_asked_for_is_no_loop_and_suspicious_is_none(tmp_path, typed):
    (tmp_path / "a.txt").write_text("The lamp was opened again and the river went on to the sea.\n" * 10)
    for options in ("", "--follow"):
        typed(f"loops {tmp_path}/a.txt {options}", 3)
        typed(["loops", f"{tmp_path}/a.txt", "--prompt", "Write ten lines.", *options.split()], 0)
    (tmp_path / "b.txt").write_text('  {"id": 1, "name": "item", "done": false},\n' * 20)
    told, said = typed(f"loops {tmp_path}/b.txt --follow").out, "b.txt suspicious: found at token "
    assert told.startswith(said) and f"\nConclusion: {said}" in told
    found = typed(f"loops {tmp_path}/a.txt --follow --json -", 3)
    assert json.loads(found.out)["result"]["records"][0]["verdict"] == "loops" and "a.txt loops: found at" in found.err


def test_no_torch_is_loaded(tmp_path):
    """By the command, also as it follows a stream, and by the function."""
    (tmp_path / "x.txt").write_text("the " * 400)
    code = (
        "import sys\nfrom sinkscope.app.cli import main\n"
        "code = main(['loops', sys.argv[1]])\n"
        "import sinkscope as ss\nss.loops.check('a b')\n"
        "follow = main(['loops', '--follow', sys.argv[1]])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'plotly', 'pandas'} & set(sys.modules)), code, follow)"
    )
    done = python(code, str(tmp_path / "x.txt"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] 3 3"
