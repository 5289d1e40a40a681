"""The scenes of stories: the counted things, beginnings, events, and questions.

Data only; `stories.py` turns it into prompts and worked answers.
In a sentence, `_word` marks the word that labels its line of the worked answer, `{n}` is the
number, `{o}` the things, `{A}` and `{B}` two names, `{s}` the pronoun of A.
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True, slots=True)
class Scene:
    """One setting: the counted things, beginnings, possible events, and questions."""

    name: str
    things: tuple[str, ...]
    opens: tuple[str, ...]
    packs: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    doubles: tuple[str, ...]
    grows: tuple[str, ...]
    halves: tuple[str, ...]
    shares: tuple[str, ...]
    asks: tuple[str, ...]


SCENES: tuple[Scene, ...] = (
    Scene(
        name="collection",
        things=_words("marbles stickers stamps cards shells beads buttons badges stones"),
        opens=(
            "{A} has {n} {o}",
            "{A} owns a collection of {n} {o}",
            "there are {n} {o} in a box that belongs to {A}",
            "{A} counts {n} {o} on the shelf",
        ),
        packs=("{A} has {n} bags with {k} {o} in each", "{A} fills {n} boxes with {k} {o} each"),
        gains=(
            "{s} _buys {n} more",
            "{s} _finds {n} {o} in the park",
            "{B} _sends {n} {o} as a present",
            "{s} _wins {n} {o} at the fair",
            "{s} _gets {n} {o} from {B}",
            "{s} _trades an old toy for {n} {o}",
        ),
        losses=(
            "{s} _gives {n} {o} to {B}",
            "{s} _loses {n} {o} on the way home",
            "{s} _sells {n} of them",
            "{s} _lends {n} {o} to {B}",
            "{B} _takes {n} {o} away",
        ),
        doubles=("{s} _doubles the collection", "the number of {o} _doubles"),
        grows=("the collection _grows to {n} times its size",),
        halves=("{s} _halves the collection", "{s} _keeps only half of them"),
        shares=(
            "{s} _sorts them into {n} equal heaps and keeps one heap",
            "{s} _splits them into {n} equal piles and keeps one pile",
        ),
        asks=(
            "how many {o} does {A} have now",
            "how many {o} are left in the end",
            "what is the size of the collection now",
            "find the number of {o} that {A} has at the end",
        ),
    ),
    Scene(
        name="bakery",
        things=_words("rolls cakes pies muffins cookies buns tarts loaves"),
        opens=(
            "a bakery has {n} {o} on display",
            "the baker starts the day with {n} {o}",
            "there are {n} {o} in the shop window",
            "in the morning {n} {o} are ready in the kitchen",
        ),
        packs=("the baker puts {k} {o} on each of {n} trays", "{n} trays hold {k} {o} each"),
        gains=(
            "the baker _bakes {n} more",
            "the oven _yields {n} fresh {o}",
            "a helper _makes {n} {o}",
            "{B} _brings {n} {o} from the other shop",
        ),
        losses=(
            "the bakery _sells {n} {o}",
            "{n} {o} are _burnt and thrown away",
            "a school _orders {n} {o} and collects them",
            "customers _eat {n} {o}",
            "the baker _donates {n} {o} to a hospital",
        ),
        doubles=("the baker works fast and _doubles the number of {o}",),
        grows=("a machine _raises the number to {n} times as many",),
        halves=("a café _takes half of the {o}", "the baker _freezes half of them"),
        shares=("the {o} are _divided equally over {n} shops and one shop keeps its part",),
        asks=(
            "how many {o} does the bakery have now",
            "how many {o} are left",
            "work out how many {o} remain at closing time",
            "what is the number of {o} at the end of the day",
        ),
    ),
    Scene(
        name="train",
        things=("passengers", "people", "travellers", "visitors"),
        opens=(
            "a train leaves the station with {n} {o}",
            "there are {n} {o} on a ship",
            "a long train carries {n} {o}",
            "at the first stop {n} {o} are on board",
        ),
        packs=("each of {n} wagons carries {k} {o}", "a train has {n} wagons with {k} {o} in each"),
        gains=(
            "{n} {o} get _on at the next stop",
            "{n} more _enter",
            "{n} {o} _join at the harbour",
            "a group of {n} _boards",
        ),
        losses=(
            "{n} {o} get _off",
            "{n} of them _leave at the bridge",
            "{n} {o} _change to another line",
            "a class of {n} gets _out",
        ),
        doubles=("in the city the number of {o} _doubles",),
        grows=("at the main station the number _rises to {n} times as many",),
        halves=("half of the {o} _leave", "half of them _stay in the village"),
        shares=("the {o} are _split equally over {n} ships and we stay on one ship",),
        asks=(
            "how many {o} are on board now",
            "how many {o} arrive at the last stop",
            "find the number of {o} at the end of the trip",
            "how many {o} are there in the end",
        ),
    ),
    Scene(
        name="library",
        things=("books", "novels", "maps", "magazines", "records", "films"),
        opens=(
            "a library has {n} {o}",
            "the school library owns {n} {o}",
            "on the shelves of a library stand {n} {o}",
            "{A} looks after {n} {o} in the town library",
        ),
        packs=("a library has {n} shelves with {k} {o} on each",),
        gains=(
            "readers _return {n} {o}",
            "the city _donates {n} {o}",
            "the library _buys {n} new {o}",
            "{B} _leaves {n} {o} to the library",
        ),
        losses=(
            "readers _borrow {n} {o}",
            "the library _sells {n} old {o}",
            "{n} {o} are _damaged by water",
            "{n} {o} are _lost",
            "a teacher _takes {n} {o} to class",
        ),
        doubles=("a rich reader _doubles the stock",),
        grows=("a new building lets the stock _grow to {n} times its size",),
        halves=("half of the {o} are _moved to another town",),
        shares=("the {o} are _spread equally over {n} towns and one town keeps its part",),
        asks=(
            "how many {o} are in the library now",
            "how many {o} does the library have in the end",
            "what is the number of {o} left on the shelves",
            "work out how many {o} are there now",
        ),
    ),
    Scene(
        name="farm",
        things=_words("eggs apples pears plums lemons melons carrots potatoes onions"),
        opens=(
            "a farmer has {n} {o}",
            "{A} picks {n} {o} on the farm",
            "there are {n} {o} in the barn",
            "the farm stores {n} {o} for the winter",
        ),
        packs=(
            "a farmer packs {n} crates with {k} {o} each",
            "{A} fills {n} baskets with {k} {o} each",
        ),
        gains=(
            "the farmer _harvests {n} more",
            "a neighbour _adds {n} {o}",
            "{B} _picks {n} {o}",
            "a truck _delivers {n} {o}",
        ),
        losses=(
            "the farmer _sells {n} {o} at the market",
            "the horses _eat {n} {o}",
            "{n} {o} _rot in the rain",
            "the family _cooks {n} {o}",
            "the farmer _feeds {n} {o} to the pigs",
        ),
        doubles=("a good summer _doubles the store",),
        grows=("a very good year _brings the store to {n} times as many",),
        halves=("the frost _ruins half of the {o}", "half of the {o} are _sold"),
        shares=("the {o} are _packed equally into {n} sacks and only one sack is kept",),
        asks=(
            "how many {o} does the farm have now",
            "how many {o} are left in the barn",
            "calculate the number of {o} that are left",
            "how many {o} can be eaten now",
        ),
    ),
    Scene(
        name="savings",
        things=("coins", "euros", "dollars", "pounds", "francs"),
        opens=(
            "{A} has {n} {o} in the bank",
            "{A} starts with {n} {o}",
            "the savings of {A} are {n} {o}",
            "in the purse of {A} are {n} {o}",
        ),
        packs=("{A} saves {k} {o} a week for {n} weeks",),
        gains=(
            "{s} _earns {n} {o}",
            "{s} _saves {n} {o} more",
            "grandmother _gives {n} {o}",
            "{s} _receives {n} {o} from {B}",
            "the bank _pays {n} {o}",
        ),
        losses=(
            "{s} _spends {n} {o} on a bicycle",
            "{s} _pays {n} {o} for a ticket",
            "{s} _owes {B} {n} {o} and hands them over",
            "a new lamp _costs {n} {o}",
            "{s} _donates {n} {o}",
        ),
        doubles=("{s} works all month and _doubles the money",),
        grows=("a clever plan _turns the money into {n} times as much",),
        halves=("{s} _spends half of the money",),
        shares=("{s} _divides the money into {n} equal parts and keeps one part",),
        asks=(
            "how many {o} does {A} have now",
            "how much money is left",
            "how many {o} remain",
            "what is the sum in {o} at the end",
        ),
    ),
    Scene(
        name="game",
        things=("points", "stars", "gems", "crowns"),
        opens=(
            "in a game {A} has {n} {o}",
            "{A} begins the second round with {n} {o}",
            "the team of {A} holds {n} {o}",
            "after one hour of play {A} has {n} {o}",
        ),
        packs=("{A} wins {n} rounds with {k} {o} each",),
        gains=(
            "{s} _scores {n} more",
            "a bonus _adds {n} {o}",
            "{s} _collects {n} {o} in the castle",
            "{s} _beats {B} and takes {n} {o}",
        ),
        losses=(
            "a mistake _costs {n} {o}",
            "{s} _drops {n} {o} in the river",
            "{B} _steals {n} {o}",
            "{s} _pays {n} {o} to open a door",
        ),
        doubles=("a magic card _doubles the {o}",),
        grows=("the wizard _multiplies the {o} by {n}",),
        halves=("a trap _halves the {o}",),
        shares=("the {o} are _shared equally by {n} players and {A} is one of them",),
        asks=(
            "how many {o} does {A} have at the end",
            "what is the final score of {A}",
            "how many {o} has {A} got now",
            "find the final number of {o}",
        ),
    ),
    Scene(
        name="store",
        things=_words("boxes bottles bricks tiles screws nails chairs lamps pipes"),
        opens=(
            "a store has {n} {o} in stock",
            "a builder orders {n} {o}",
            "there are {n} {o} in the yard",
            "the company keeps {n} {o} in a hall",
        ),
        packs=("a store gets {n} pallets with {k} {o} on each",),
        gains=(
            "a truck _brings {n} more",
            "the factory _makes {n} {o}",
            "workers _unload {n} {o}",
            "a customer _returns {n} {o}",
        ),
        losses=(
            "a customer _buys {n} {o}",
            "{n} {o} _break",
            "workers _use {n} {o}",
            "the store _ships {n} {o} to {B}",
            "thieves _steal {n} {o}",
        ),
        doubles=("a big delivery _doubles the stock",),
        grows=("the owner _expands the stock to {n} times its size",),
        halves=("half of the {o} are _used",),
        shares=("the {o} are _loaded equally onto {n} trucks and only one truck stays",),
        asks=(
            "how many {o} are in stock now",
            "how many {o} are left",
            "compute the number of {o} in the end",
            "what does the stock come to",
        ),
    ),
    Scene(
        name="garden",
        things=_words("flowers roses tulips trees plants seeds bushes herbs"),
        opens=(
            "a garden has {n} {o}",
            "{A} plants {n} {o}",
            "the gardener counts {n} {o}",
            "in spring there are {n} {o} in the field",
        ),
        packs=("{A} plants {n} rows of {k} {o}",),
        gains=(
            "{s} _plants {n} more",
            "the wind _brings {n} {o}",
            "{B} _adds {n} {o}",
            "{n} new {o} _appear",
        ),
        losses=(
            "{n} {o} _die in the heat",
            "rabbits _eat {n} {o}",
            "{s} _cuts {n} {o}",
            "a storm _destroys {n} {o}",
        ),
        doubles=("by summer the number of {o} _doubles",),
        grows=("after two years the number _grows to {n} times as many",),
        halves=("a dry month _kills half of the {o}",),
        shares=("the {o} are _set out equally in {n} beds and only one bed survives",),
        asks=(
            "how many {o} are in the garden now",
            "how many {o} are left",
            "count the {o} at the end",
            "how many {o} does the gardener see in autumn",
        ),
    ),
    Scene(
        name="tank",
        things=("litres", "buckets", "cups", "barrels"),
        opens=(
            "a tank holds {n} {o} of water",
            "there are {n} {o} of milk in a tank",
            "a pool is filled with {n} {o} of water",
            "the well gives {n} {o} of water",
        ),
        packs=("a pump fills {k} {o} an hour for {n} hours",),
        gains=(
            "the rain _adds {n} {o}",
            "{B} _pours in {n} {o}",
            "a pump _fills in {n} {o}",
        ),
        losses=(
            "{n} {o} _leak out",
            "the cows _drink {n} {o}",
            "{B} _uses {n} {o} for the garden",
            "{n} {o} _dry up in the sun",
        ),
        doubles=("a flood _doubles the amount",),
        grows=("a stream _lifts the amount to {n} times as much",),
        halves=("a hole _drains half of it",),
        shares=("all of it is _poured equally into {n} small tanks and only one is kept",),
        asks=(
            "how many {o} are in it now",
            "how many {o} are left",
            "what amount in {o} is there at the end",
            "how many {o} can still be used",
        ),
    ),
)
