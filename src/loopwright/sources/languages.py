"""How likely a text is in the languages of an encoding, by the frequencies of their characters.

The probabilities are rough: the common characters of a language share most of the mass, the others the rest. Words
count once, so that a file of few labels stays uncertain however often it repeats them.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from math import log

# The letters of alphabets, from frequent to rare, and the languages of an encoding.
_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфёъіїєґјљњћђџ"
_GREEK = "αοιετσνρυπκηλμςδίόωέάγθήχφύβώξζψϊΐϋ"
_HEBREW = "יוהלאתרבשמםנדעחקפגכסטצןזךץף"
_ARABIC = "اليمنترهودبسعفكحجقةأشصطزضخغذإثءئظىآؤ،؟؛پچژگکی"
_THAI = "านรอก่เ้งมยลวัดีทสติะปบคหแจพชขใ์ไื็ุูผโำซถศณึธภฟญษฉฐฝๆฎฮ"
_WESTERN = ("éèàêçôîûùâëïœ", "üäöß", "óíáñéúü", "ãçáéíõóêâúàô", "àèéìòùó", "äöåøæé", "éäüöàèçóíáñãôêâîûëïåøæßúõìòùœ")
_CENTRAL = ("łóżęąśćńź", "íáéěýžřšůčúťďňó", "áíéýčšžúľťôňäďó", "éáóöőüíúű", "ăîâșțşţ", "čšžćđ", *_WESTERN[:3])
_LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cp1252", "mac_roman", "cp850"), _WESTERN),
    **dict.fromkeys(("cp1250", "iso8859_2"), _CENTRAL),
    "cp1254": ("ıüşçöğâî", *_WESTERN[:2]),
    "cp1257": ("āēīšūņļģčķž", "ėšąžįųčūę", "äõüöšž"),
    **dict.fromkeys(("cp1251", "koi8_r", "cp866"), (_CYRILLIC,)),
    "cp1253": (_GREEK,),
    "cp1255": (_HEBREW,),
    **dict.fromkeys(("cp1256", "iso8859_6"), (_ARABIC,)),
    "cp874": (_THAI,),
}
_HANZI = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然"
    "家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把"
    "机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果"
    "加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔"
    "更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展"
    "马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共"
    "确传师观清今切院让识候带导争运笑飞风步改收根干造言联持组每济车亲极林服快办议往元英士证近失转夫令准布始怎呢存未"
    "远叫台单影具罗字爱击流备兵连调深商算质团集百需价花党华城石级整府离况亚请技际约示复病息究线似官火断精满支视消越"
    "器容照须九增猫狗鸟鱼牛羊猪鸡兔虎龙树草红黄蓝绿黑紫图片差评坏优良否错喜欢怒哀乐恶店吃喝买卖票购货客户垃圾广娱育"
    "财房游戏健康食旅汽股彩搜汉语韩男孩童衣鞋包脑苹香蕉橙梨桃苏州京沪湖江河省县镇村春夏秋冬早晚午夜左右"
)
_TRADITIONAL = (
    "這個們來為國時說會對過發後裡樣經麼學還進現當動點開從實無與長機將兩間問頭體產業關電話門應戰見給內東處義幾認條氣"
    "題爾變總數報結務場計資許統區隊決馬達強難權設聲員覺術領確傳師觀讓識帶導爭運飛風張邊類規萬聯組濟車親極辦議證轉單"
    "羅愛擊備連調質團價黨華級離況亞請際約複線斷滿視須貓鳥魚豬雞龍樹紅黃藍綠圖評壞優錯歡樂惡買賣購貨戶廣財遊戲貴寶棒"
    "讚爛慢貼"
)
_KANJI = "犬悪気駅円図売読書飲両楽薬歩歳戦対応広島県町様込働屋付値届遅低普満足肯"
_HANGUL = (
    "이다는의에을가고하지한로사기은도리자들그를있어서나인시해대정스일라보었장아수으전만부것과제할면유여원상선조동구"
    "비게세소성주경안야마니적신우러무미국학생문모오방화당개진공민관금회거연내중말용설영와식실물체분려음름습합좋않없"
    "했던였요네군계트드르바단간반발배변불빠산살새색석속손송순술쉬승심씨악알양억언얼업역열예완왜외운울월위육응임입잘"
    "재저점접종죠줄즈증직질집째차착찬찾책처천철청초총최추축출치친카코크타태터토통투특파판편평포표품프피필함항행향험"
    "혀현형호혹혼환황획후휴흐희히강쁨싫싶별루매짜긍쥐빨갈노랑란검흰맛됨님께럼까때많"
)
_KANA = "".join(map(chr, range(0x3041, 0x30FD)))
_MARKS = frozenset("\xa0‘’“”„–—…€£°«»¿¡™®©·•§№、。，．！？：；（）「」『』・ー～《》【】")
# By encoding: groups of characters with the share of each, and the share of the others by their bytes.
_CHINESE, _JAPANESE = ((_HANZI, 0.65),), ((_KANA, 0.6), (_KANJI + _HANZI + _TRADITIONAL, 0.25))
_ASIAN = {
    "gb18030": (_CHINESE, b"\xb0\xa1\xd7\xf9", 3755),
    "big5": (((_TRADITIONAL + _HANZI, 0.65),), b"\xa4\x40\xc6\x7e", 5401),
    "cp932": (_JAPANESE, b"\x88\x9f\x98\x72", 2965),
    "euc_jp": (_JAPANESE, b"\xb0\xa1\xcf\xd3", 2965),
    "cp949": (((_HANGUL, 0.85),), b"\xb0\xa1\xc8\xfe", 2350),
    "johab": (((_HANGUL, 0.85),), b"\x88\x61\xd3\xbd", 11172),
}
_RARE, _STRANGE = log(0.03 / 5000), log(1e-6)
_PRIORS = {"gb18030": 0.0, "cp1252": 0.0, "cp1251": -0.5, "big5": -1.0, "cp932": -1.0, "cp1250": -1.0, "cp949": -1.5}
_PRIORS |= dict.fromkeys(("cp1253", "cp1254", "cp1255", "cp1256", "cp874", "euc_jp"), -2.0)
_PRIORS |= dict.fromkeys(("cp1257", "koi8_r", "iso8859_2"), -3.0)
_PRIORS |= dict.fromkeys(("cp866", "cp850", "iso8859_6", "johab"), -6.0) | {"mac_roman": -7.0}
ENCODINGS = tuple(_PRIORS)
MULTIBYTE = frozenset(_ASIAN)
_WORD = re.compile(r"[a-zA-Z\x80-\U0010ffff]+")
_ODD = re.compile(r"[^\x00-\x7f]")
_NEXT_TO_ASCII = re.compile(r"(?<=[a-zA-Z])[^\x00-\x7f]|[^\x00-\x7f](?=[a-zA-Z])")


def fit(text: str, encoding: str) -> tuple[float, float]:
    """Return the log-probability of the words of a text that are not ASCII, and the mean of their characters.

    The characters of a script are rarely beside ASCII letters; accented letters nearly always are. Capitals start a
    word or make up all of it.
    """
    words = {word for word in _WORD.findall(text) if not word.isascii()}
    marks = sum(word.count(mark) for word in words for mark in _MARKS.intersection(word))
    joined = " ".join(words).translate(dict.fromkeys(map(ord, _MARKS), " "))
    beside, runs = len(_NEXT_TO_ASCII.findall(joined)), len(re.findall(r"(?<=[^\x00-\x7f])[^\x00-\x7f]", joined))
    alphabets = _LANGUAGES.get(encoding, ())
    counts = Counter(_ODD.findall(joined.replace("İ", "ı").lower() if alphabets else joined))
    if not alphabets:
        found, penalty = sum(_log_of(encoding, each) * number for each, number in counts.items()), 2.0 * beside
    else:
        found = max(sum(_log_in(alphabet, each) * number for each, number in counts.items()) for alphabet in alphabets)
        alone = len(re.findall(r"(?<![^\W\d_])[^\x00-\x7f](?![^\W\d_])", joined))
        penalty = 2.5 * runs + 2.0 * alone if alphabets[0][0] < "\u0250" else 3.0 * beside  # of Latin letters or others
        mixed = (word[1:] for word in joined.split() if not word.isupper())
        penalty += 4 * sum(letter.isupper() for rest in mixed for letter in rest)
        penalty += 0.7 * sum(len(word) for word in joined.split() if word.isupper() and len(word) > 1)
    total = found - penalty
    return _PRIORS[encoding] + total + marks * log(0.02), total / max(1, sum(counts.values()))


@lru_cache(maxsize=10_000)
def _log_of(encoding: str, character: str) -> float:
    """Return the log-probability of a character of a multibyte encoding."""
    groups, (lead, trail, last, end), number = _ASIAN[encoding]
    code = character.encode(encoding)
    in_place_of_ascii = 3.0 if min(code) < 0x80 else 0.0  # a letter that other encodings would have to explain
    for group, share in groups:
        if character in group:
            return log(share / len(set(group))) + in_place_of_ascii
    is_usual = bytes((lead, trail)) <= code <= bytes((last, end)) and (trail < 0xA1 or code[1] >= 0xA1)
    rest = 0.97 - sum(share for _, share in groups)
    return (log(rest / number) if is_usual else _RARE) + in_place_of_ascii


@lru_cache(maxsize=10_000)
def _log_in(alphabet: str, letter: str) -> float:
    rank, size = alphabet.find(letter), len(alphabet)
    if rank < 0:
        return log(0.002) if letter.isalpha() else _STRANGE
    return log((size - rank) ** 1.5 / sum(each**1.5 for each in range(1, size + 1)))
