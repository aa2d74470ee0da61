"""Little stories without a file or a network: any number of them, story i a pure function of (seed, i).

A story draws its own world first (a hero, a friend, an elder, an animal, a thing, a place, weather, numbers) and then
tells one of the plots about it. The world recurs: names, pronouns, colours, hiding places, sounds and sums agree from
the first paragraph to the last, so that a model gains from long context. Words and sentences are drawn with mildly
falling probabilities, as in real text: the r-th of a list with weight 1 / (r + 3).

The plots are written in a small notation. A line is a sentence or two, an empty line ends a paragraph, `a | b` tells
one of two, `[a/b]` the same within a sentence, a line that starts with `?` is told three times in five, `{name}` is a
value of the world or a word of a list (capitalized when written {Name}), `@name` is a line of the shared ones, and
an indented line goes on with the one above. "A" before a word that starts with a vowel sound becomes "an".
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

VERSION = 1  # of the stories; a change of any text or rule here raises it, and prepared data is made anew

# ------------------------------------------------------------------------------------------------------------- lexicon
# most frequent first


def _words(text: str) -> list[str]:
    return [word.strip().replace("\n", " ") for word in text.split(",")]


def _records(text: str) -> list[tuple[str, ...]]:
    return [tuple(field.strip() for field in line.split(",")) for line in text.strip().splitlines()]


GIRLS = _words(
    """Mia, Nora, Ella, Rosa, Ivy, Clara, Hana, Lucy, Zoe, Amara, Tess, Greta, Leila, Maya, Olive, Paula, Ruth, Stella,
    Wanda, Yara, Alma, Bella, Dora, Edith, Fay, Gwen, Hazel, Ines, Jade, Kira, Lena, Molly, Nadia, Opal, Penny, Rita,
    Sonia, Thea, Uma, Vera, Willa, Xenia, Yuki, Zara, Agnes, Bridget, Carmen, Delia, Esther, Flora, Gemma, Heidi, Irma,
    Joan, Keiko, Lottie, Marta, Nina, Odette, Priya, Ramona, Selma, Tilda, Ursula, Viola, Winnie"""
)
BOYS = _words(
    """Leo, Finn, Omar, Hugo, Theo, Milo, Jack, Ravi, Oscar, Felix, Noah, Otto, Emil, Sami, Gus, Amir, Ben, Caleb,
    Diego,    Elias, Frank, Goran, Henry, Ivan, Jonas, Kofi, Luca, Mateo, Nils, Owen, Pablo, Quinn, Rafael,
    Simon, Tariq, Umar,
    Victor, Walter, Yusuf, Zeke, Albert, Bruno, Cyrus, Dennis, Edgar, Fritz, Gilbert, Hector, Igor, Jasper, Karl, Lars,
    Marvin, Nico, Orson, Perry, Rupert, Sven, Toby, Ulrich, Vince, Wilbur, Xavier, Yannick, Anton, Boris"""
)
PETS = _words(
    """Pip, Biscuit, Pepper, Button, Waffle, Ziggy, Clover, Muffin, Rusty, Snowball, Domino, Pickle, Ginger, Bramble,
    Cocoa, Dusty, Echo, Fudge, Gizmo, Honey, Inky, Jingle, Kipper, Lucky, Mango, Nutmeg, Olly, Patch, Quill, Ripple,
    Socks, Tango, Umber, Velvet, Whiskers, Yoyo, Zebby, Acorn, Bubbles, Cricket, Dizzy, Fern"""
)
SURNAMES = _words(
    """Brown, Hill, Oakley, Baker, Woods, Finch, Marsh, Potter, Stone, Fields, Lark, Winter, Penn, Barlow, Crane, Dale,
    Fox, Grove, Holt, Moss, Nash, Parks, Reed, Swift, Thorn, Vale, Webb, York, Abbot, Bloom"""
)
# animal, sound, food, home, young or small description
ANIMALS = _records(
    """dog, barked, a bone, kennel, fluffy
    cat, meowed, some milk, basket, striped
    bird, chirped, a few seeds, nest, tiny
    rabbit, squeaked, a carrot, burrow, soft
    duck, quacked, some bread crumbs, pond, yellow
    frog, croaked, a fly, puddle, slimy
    mouse, squeaked, some cheese, hole, gray
    squirrel, chattered, a nut, hollow tree, bushy
    fox, yelped, some berries, den, red
    owl, hooted, a beetle, barn, sleepy
    bear, growled, some honey, cave, brown
    hedgehog, snuffled, a worm, pile of leaves, prickly
    pony, neighed, some oats, stable, spotted
    lamb, bleated, some clover, meadow, woolly
    goat, bleated, a thistle, shed, bearded
    piglet, grunted, a turnip, sty, pink
    turtle, sighed, some lettuce, pond, slow
    kitten, purred, a bowl of cream, cushion, playful
    puppy, whimpered, a sausage, box, clumsy
    hen, clucked, some corn, coop, plump
    parrot, screeched, a grape, cage, colorful
    donkey, brayed, some hay, paddock, stubborn
    beaver, slapped its tail, some bark, dam, busy
    otter, whistled, a fish, river bank, sleek
    deer, snorted, some grass, thicket, graceful
    goose, honked, some barley, farmyard, noisy
    bee, buzzed, some nectar, hive, golden
    crow, cawed, a crust, chimney, clever
    swan, hissed, some water weed, lake, white
    monkey, shrieked, a banana, treetop, cheeky
    elephant, trumpeted, some peanuts, watering hole, huge
    hamster, squealed, a sunflower seed, wheel, round
    snail, made no sound, a cabbage leaf, shell, shy
    raccoon, chirred, an egg, attic, masked
    penguin, squawked, a herring, iceberg, waddling
    seal, barked, a sardine, rock, shiny
    badger, grumbled, a root, tunnel, grumpy
    camel, groaned, a date, tent, tall
    butterfly, fluttered, some pollen, flower bed, bright
    ladybug, hummed, a leaf, rose bush, dotted"""
)
# thing, what one does with it (past), what it is made of, part of it that breaks
THINGS = _records(
    """ball, kicked, rubber, seam
    kite, flew, paper, tail
    doll, dressed, cloth, arm
    boat, sailed, wood, mast
    book, read, paper, cover
    hat, wore, wool, brim
    drum, banged, tin, skin
    bike, rode, metal, chain
    wagon, pulled, wood, wheel
    scarf, wore, wool, fringe
    bear, hugged, plush, ear
    puzzle, solved, cardboard, corner
    lamp, lit, glass, switch
    bell, rang, brass, clapper
    flute, played, bamboo, mouthpiece
    umbrella, opened, silk, handle
    train, pushed, tin, engine
    sled, rode, pine, runner
    basket, carried, straw, lid
    ring, polished, silver, stone
    watch, wound, gold, hand
    puppet, moved, felt, string
    robot, built, steel, antenna
    balloon, held, foil, ribbon
    mirror, polished, glass, frame
    violin, practiced, maple, bow
    teapot, filled, china, spout
    pillow, squeezed, cotton, button
    backpack, packed, canvas, strap
    rocket, launched, plastic, fin
    camera, aimed, metal, lens
    crown, wore, cardboard, point
    bucket, filled, plastic, handle
    shovel, used, iron, blade
    necklace, tried on, pearl, clasp
    trumpet, blew, brass, valve
    chair, painted, oak, leg
    clock, fixed, walnut, spring
    cup, washed, clay, rim
    telescope, turned, copper, stand
    blanket, folded, fleece, hem
    jar, shook, glass, cap
    lantern, hung, tin, wick
    map, unrolled, parchment, edge
    whistle, blew, plastic, loop
    yo-yo, spun, wood, cord
    globe, turned, papier-mache, axle
    pencil, sharpened, cedar, tip
    compass, followed, brass, needle
    guitar, strummed, spruce, peg"""
)
# place, with preposition, what one sees there, what one smells or hears there
PLACES = _records(
    """the park, in the park, green benches, the laughter of children
    the garden, in the garden, rows of flowers, the hum of insects
    the forest, in the forest, tall trees, the rustle of leaves
    the beach, on the beach, white shells, the roar of the waves
    the farm, on the farm, red barns, the smell of hay
    the lake, by the lake, floating lilies, the splash of fish
    the market, at the market, crowded stalls, the smell of spices
    the school, at school, wooden desks, the ring of the bell
    the river, by the river, smooth stones, the rush of water
    the playground, on the playground, squeaky swings, happy shouts
    the hill, on the hill, wild grass, the whisper of the wind
    the library, in the library, dusty shelves, the turning of pages
    the zoo, at the zoo, strong fences, the roar of lions
    the village, in the village, crooked houses, the clang of the smithy
    the mountain, on the mountain, steep cliffs, the cry of eagles
    the castle, in the castle, stone towers, the echo of footsteps
    the harbor, at the harbor, fishing boats, the scream of gulls
    the station, at the station, long platforms, the hiss of steam
    the orchard, in the orchard, bent branches, the smell of ripe fruit
    the museum, in the museum, old paintings, the hush of the halls
    the island, on the island, palm trees, the beat of the surf
    the meadow, in the meadow, purple clover, the song of larks
    the mill, at the mill, heavy sacks, the rattle of the wheel
    the jungle, in the jungle, hanging ropes, the calls of monkeys
    the bakery, at the bakery, warm ovens, the smell of fresh bread
    the circus, at the circus, striped tents, the sound of trumpets
    the valley, in the valley, winding paths, the murmur of a brook
    the bridge, on the bridge, rusty rails, the rumble of carts
    the cave, in the cave, glittering crystals, the drip of water
    the desert, in the desert, yellow dunes, the silence of the sand
    the theater, at the theater, velvet curtains, the tuning of fiddles
    the swamp, in the swamp, twisted roots, the chorus of toads
    the workshop, in the workshop, sharp tools, the smell of glue
    the lighthouse, at the lighthouse, narrow stairs, the howl of the foghorn
    the vineyard, in the vineyard, curling vines, the chatter of pickers
    the fair, at the fair, spinning rides, the smell of popcorn"""
)
# noun, sentence, what it makes things, how it ends
WEATHERS = _records(
    """sun, The sun was shining, warm, the sun went down
    rain, Rain was falling, wet, the rain stopped
    wind, A strong wind was blowing, messy, the wind calmed down
    snow, Snow covered everything, cold, the snow melted
    fog, Thick fog hung over the roofs, gray, the fog lifted
    storm, A storm was coming, dark, the storm passed
    heat, It was very hot, dry, the evening grew cool
    frost, Frost sparkled on the windows, icy, the frost thawed
    drizzle, A light drizzle tickled the leaves, damp, the drizzle ended
    hail, Hail drummed on the roof, slippery, the hail turned to rain
    thunder, Thunder rolled far away, gloomy, the thunder faded
    breeze, A gentle breeze was blowing, fresh, the breeze died away
    mist, Mist rose from the fields, pale, the mist cleared
    cloud, Big clouds sailed across the sky, shady, the clouds moved on"""
)
# singular, plural
FOODS = _records(
    """apple, apples
    cookie, cookies
    berry, berries
    cake, cakes
    pear, pears
    carrot, carrots
    plum, plums
    muffin, muffins
    orange, oranges
    cherry, cherries
    nut, nuts
    pancake, pancakes
    egg, eggs
    tomato, tomatoes
    peach, peaches
    sandwich, sandwiches
    bun, buns
    lemon, lemons
    candy, candies
    grape, grapes
    potato, potatoes
    strawberry, strawberries
    pie, pies
    banana, bananas
    pretzel, pretzels
    waffle, waffles
    onion, onions
    mushroom, mushrooms
    dumpling, dumplings
    radish, radishes
    fig, figs
    apricot, apricots
    doughnut, doughnuts
    pumpkin, pumpkins
    chestnut, chestnuts
    biscuit, biscuits
    melon, melons
    turnip, turnips
    olive, olives
    cupcake, cupcakes"""
)
# job, where, what the person makes or brings
JOBS = _records(
    """baker, bakery, bread
    farmer, farm, vegetables
    teacher, school, lessons
    gardener, garden, roses
    doctor, hospital, medicine
    fisherman, harbor, fish
    carpenter, workshop, shelves
    tailor, shop, coats
    shepherd, pasture, wool
    mail carrier, post office, letters
    painter, studio, pictures
    miller, mill, flour
    cook, inn, stew
    cobbler, cellar, shoes
    librarian, library, stories
    beekeeper, orchard, honey
    blacksmith, forge, horseshoes
    sailor, ship, tales
    musician, theater, songs
    potter, kiln, bowls
    clockmaker, tower, clocks
    weaver, loft, carpets
    nurse, clinic, bandages
    firefighter, station, ladders
    pilot, airfield, maps
    juggler, circus, tricks
    candle maker, cottage, candles
    ferryman, river, passengers
    astronomer, observatory, star charts
    glassblower, hut, vases"""
)
SPOTS = _words(
    """under the bed, behind the sofa, in the closet, on the roof, under the stairs, behind the curtain, in the laundry,
    on top of the cupboard, in the mailbox, under a bush, behind the shed, in the bathtub, between two cushions,
    in a rubber boot, under the rug, in the toolbox, beside the fireplace, in the dog's basket, behind the piano,
    in the hollow log, under the porch, in the hay, in the wheelbarrow, behind the water barrel, on the window sill,
    in the oven, beneath the willow, in the drawer, by the gate, inside the flowerpot, at the bottom of the trunk,
    in the bread bin, behind the waterfall, under the old cart, on the highest shelf, next to the compost heap,
    in the picnic hamper, behind the bookcase, beside the well, in the umbrella stand"""
)
LISTS: dict[str, list[str]] = {
    "color": _words(
        """red, blue, green, yellow, white, black, pink, purple, orange, brown, gray, silver, golden, turquoise, violet,
        crimson, cream, scarlet, navy, emerald, amber, ivory, teal, lilac, copper"""
    ),
    "size": _words("""little, big, small, tiny, huge, tall, long, short, wide, narrow, giant, enormous"""),
    "good": _words(
        """kind, brave, clever, happy, gentle, curious, cheerful, patient, friendly, honest, careful, polite, helpful,
        generous, lively, quiet, funny, playful, thoughtful, loyal, bold, merry, sensible, hopeful, wise, creative,
        tidy, calm, eager, tender, graceful, hardworking, bright, daring, sincere, witty"""
    ),
    "bad": _words(
        """greedy, lazy, grumpy, rude, selfish, jealous, stubborn, bossy, careless, mean, naughty, impatient, proud,
        noisy, sneaky, boastful, clumsy, gloomy, forgetful, picky"""
    ),
    "glad": _words(
        """happy, glad, proud, excited, thankful, relieved, delighted, joyful, pleased, cheerful, surprised, hopeful,
        overjoyed, amazed, grateful, content, thrilled, peaceful, lucky, comfortable"""
    ),
    "upset": _words(
        """sad, scared, angry, worried, tired, lonely, upset, nervous, ashamed, confused, disappointed, cross, afraid,
        miserable, bored, jealous, frightened, sorry, puzzled, unhappy, embarrassed, restless, homesick, hopeless"""
    ),
    "nice": _words(
        """beautiful, pretty, shiny, lovely, wonderful, soft, special, fine, sweet, sparkling, magic, precious,
        splendid, perfect, charming, fancy, smooth, colorful, elegant, handsome, dazzling, delicate, marvelous, neat"""
    ),
    "old": _words(
        """old, broken, dusty, rusty, torn, dirty, plain, worn, cracked, faded, crooked, shabby, wobbly, muddy, bent,
        patched, forgotten, ancient, squeaky, scratched"""
    ),
    "yummy": _words(
        """sweet, fresh, warm, juicy, crunchy, tasty, ripe, delicious, soft, sticky, salty, sour, crisp, golden, spicy,
        creamy, sugary, buttery, fluffy, tender"""
    ),
    "went": _words(
        """ran, walked, hurried, went, skipped, raced, marched, wandered, hopped, climbed, strolled, dashed, crept,
        tiptoed, trudged, rushed, jogged, galloped, stumbled, paraded, sneaked, bounced, limped, drifted"""
    ),
    "said": _words(
        """said, asked, shouted, whispered, cried, called, answered, explained, sighed, replied, yelled,
        muttered, added, mumbled, exclaimed, suggested, begged, admitted, agreed, announced, insisted, promised"""
    ),
    "told": _words("""said, answered, explained, replied, whispered, agreed, suggested, decided"""),
    "how": _words(
        """quickly, slowly, quietly, carefully, happily, loudly, gently, suddenly, softly, bravely, proudly, sadly,
        eagerly, calmly, gladly, politely, patiently, nervously, gracefully, clumsily, cheerfully, silently, firmly,
        sleepily, shyly, warmly, boldly, secretly, lazily, steadily"""
    ),
    "looked": _words("""looked, searched, hunted, peeked, checked, peered, glanced, poked around, rummaged"""),
    "play": _words(
        """tag, hide and seek, catch, pirates, chess, marbles, hopscotch, cards, soccer, dress up, leapfrog, checkers,
        jump rope, explorers, knights, dominoes, charades, detectives, badminton, shopkeepers, follow the leader"""
    ),
    "hobby": _words(
        """singing, dancing, drawing, swimming, reading, cooking, painting, climbing trees, telling jokes, fishing,
        counting stars, collecting stamps, baking, skating, gardening, whistling, juggling, knitting, inventing things,
        riding horses, building towers, watching birds, writing poems, playing chess, solving riddles, sewing, hiking,
        making paper boats, catching fireflies, doing cartwheels, looking at clouds, learning magic tricks"""
    ),
    "day": _words(
        """One day, One morning, One afternoon, Yesterday, One Saturday, One Sunday, On Monday, One summer day,
        One winter morning, Last week, One autumn evening, On Friday, Early one morning, Late one evening,
        One spring day, On a holiday, One Tuesday, In the middle of the week, One Wednesday, Just after lunch"""
    ),
    "later": _words(
        """Soon, After a while, A little later, Then, At last, In the end, Before long, By noon, An hour later,
        That evening, Finally, The next day, When it was almost dark, Two days later, At sunset, In the meantime"""
    ),
    "oh": _words(
        """Oh no, Oh dear, Look, Wait, Help, Listen, Hello, Please, Wow, Hey, Goodness, Hooray, Well, Psst, Careful"""
    ),
    "plant": _words(
        """rose, sunflower, tulip, bean, daisy, pumpkin, carrot, lily, tomato, violet, pea, poppy, cabbage, orchid,
        pansy, daffodil, cucumber, lavender, melon, marigold, pepper, spinach, iris, radish, peony, basil, mint,
        geranium, parsley, lupine"""
    ),
    "tree": _words(
        """oak, apple tree, willow, pine, birch, maple, cherry tree, beech, elm, chestnut, cedar, palm, fir"""
    ),
    "wear": _words(
        """coat, hat, scarf, dress, boots, sweater, shirt, jacket, cap, apron, mittens, socks, raincoat, shoes, cape,
        vest, sandals, gloves, pajamas, overalls, skirt, slippers, belt, hood, tie, robe, shawl"""
    ),
    "body": _words(
        """hand, knee, foot, arm, finger, nose, head, leg, elbow, toe, ear, ankle, back, chin, wrist, tail"""
    ),
    "room": _words(
        """kitchen, bedroom, garden, hall, cellar, attic, bathroom, living room, garage, yard, pantry, porch, balcony,
        nursery, workshop, laundry room"""
    ),
    "material": _words(
        """wood, paper, string, glue, paint, nails, cloth, cardboard, clay, tape, wire, ribbons, buttons, straw, bricks,
        feathers, beads, bark, stones, yarn, leather, wax, chalk, sand, cork"""
    ),
    "build": _words(
        """treehouse, birdhouse, castle, bridge, raft, tower, scarecrow, fort, snowman, cake, boat, swing, tent, fence,
        puppet theater, windmill, bench, kennel, tunnel, garden gate, rocking chair, sundial, merry-go-round, wigwam"""
    ),
    "gift": _words(
        """book, drawing, song, flower, cake, scarf, letter, necklace, seashell, poem, card, basket of fruit, bracelet,
        music box, kite, cushion, jar of jam, feather, box of chocolates, bouquet, pocketknife, marble, paintbrush"""
    ),
    "shop": _words(
        """toy shop, candy store, bookshop, grocery, hardware store, flower stand, bakery, pet shop, tea house,
        antique shop, fish stall, candle shop, hat shop"""
    ),
    "dream": _words(
        """fly to the moon, sail across the sea, meet a king, ride a dragon, find a treasure, become a doctor,
        swim with whales, climb the highest mountain, paint a rainbow, sing on a stage, visit a volcano,
        talk to animals, build a robot, win a medal, see the northern lights, drive a train,
        live in a lighthouse, travel the world,
        discover a planet, learn every language, invent a machine, open a bakery, cross the jungle, catch a star"""
    ),
    "noise": _words(
        """thump, crash, bang, click, splash, creak, rustle, knock, rattle, squeak, buzz, clatter, pop, howl"""
    ),
    "sight": _words(
        """rainbow, butterfly, shooting star, hot air balloon, waterfall, ladder, sailboat, squirrel, windmill, parade,
        flock of geese, tractor, statue, fountain, snail, dragonfly, train, signpost, cobweb, beehive, haystack,
        mailbox, puddle, campfire, tunnel, fishing net, horse cart, sand castle, drawbridge, weathercock"""
    ),
    "lesson": _words(
        """share, tell the truth, be patient, listen, say sorry, ask for help, keep a promise, try again, be kind, wait,
        work together, forgive, be careful, slow down, take turns, be brave, think first, say thank you, keep going,
        look after your things, include everyone, help without being asked"""
    ),
    "bit": _words("""a little, a bit, very, so, quite, rather, really, almost, terribly, somewhat"""),
}
ELDERS = _records(
    """mother, she
    father, he
    grandmother, she
    grandfather, he
    aunt, she
    uncle, he
    big sister, she
    big brother, he
    cousin, she"""
)
NUMBERS = _words("zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen")
TIMES = _words("no times, once, twice, three times, four times, five times, six times")

# -------------------------------------------------------------------------------------------------------------- plots

SHARED = """
opening: Once upon a time there was a {trait} {kind} named {hero}. {He} lived [with {his} {elder}/near {place}/in a
    {size} {color} house/next to a {job}] and [loved/liked/enjoyed] {hobby}. | There was once a {size} village near
    {place}. A {trait} {kind} named {hero} lived there. | {hero} was a {trait} {kind} who [loved/liked] {hobby} and
    {hobby2}. | {hero} and {friend} were [best friends/neighbors/in the same class]. {hero} was {trait}, and {friend}
    was [always/often/never] {trait2}. | {day} {hero}, a {trait} {kind}, woke up and felt {glad}. | Once there was a
    {kind} called {hero}. Everyone said that {hero} was the most {trait} {kind} {in_place}. | In a {size} {color}
    house near {place} lived {hero}, a {trait} {kind} with a {old} {wear}. | Far away, [beyond/behind/beside] {place},
    a {trait} {kind} named {hero} lived with {his} {elder}. | {hero} was {bit} {trait2} but very {trait}. {His}
    favorite color was {color}. | Do you know {hero}, the {trait} {kind} with the {color} {wear}? This is what
    happened to {him}. | Long ago, when [houses/wells/roads] were [few/small/made of {material}], a {kind} named
    {hero} dreamed that {he} would {dream}.
weather: {weather_says}, and everything was {wet}. | {weather_says}. {hero} put on {his} {color2} {wear}. |
    {weather_says}, but {hero} did not mind the {weather}. | [All day long/Since breakfast/Outside], {hero} could see
    the {weather}. | It was a {wet} day because of the {weather}. | {weather_says} {in_place}.
weather_end: {later} {weather_ends}. | {later} {weather_ends}, and nothing was {wet} any more. | When {weather_ends},
    {hero} [smiled/cheered/yawned/opened the window]. | {later} {weather_ends} and there was nothing left but
    {place_sight} and {place_sound}.
go: {He} {went} to {place}. | {He} {went} {how} to {place} with {friend}. | {hero} put on {his} {wear} and {went} to
    {place}. | Together {hero} and {friend} {went} to {place}, past a {sight} and a {color2} {sight2}. | {hero} took
    {his} {thing} and {went} to {place}. | They {went} along a {size} path until they saw {place_sight}.
place: {In_place} there were {place_sight}. | {hero} liked {place_sight} and {place_sound}. | The first thing {he}
    noticed was {place_sound}. | {In_place} {he} saw a {sight}, a {sight2} and many {place_sight}. | There were
    {place_sight} and, far away, a {nice} {sight}.
hobby_talk: "I like {hobby}," said {friend}. "And I like {hobby2}," {hero} {told}. | "Do you want to play {play}?"
    {friend} asked. "Yes, please!" {hero} {told}. | They played {play} and {play2} until they were {upset}. | "When I
    am big, I will {dream}," {hero} said {how}. | "What is your favorite color?" asked {friend}. "{Color}," {told}
    {hero}. | {friend} told a story about a {job} who wanted to {dream}.
thank: "Thank you, {friend}," said {hero}. | "Thank you so much!" {he} {said} {how}. | {hero} gave {friend} a {size}
    hug. | "You are so {trait2}, {friend}!" {said} {hero}. | {hero} was so {glad} that {he} [hugged/thanked/kissed]
    everybody. | {friend} smiled and felt {bit} {glad}.
worry: {hero} felt {bit} {upset}. | {He} was so {upset} that {he} [could not sleep/sat down on a {thing2}/began to
    cry/did not eat {his} {food}]. | "{Oh}! What can we do?" {said} {friend}. | {hero}'s {body}
    [trembled/hurt/itched], and {he} felt {upset}. | "Do not be {upset}," {friend} said {how}.
moral: From that day on, {hero} always remembered to {lesson}. | {hero} learned that it is [good/important/best/wise]
    to {lesson}. | And so {hero} and {friend} learned to {lesson}. | "Next time I will {lesson}," {hero} {told}. "And
    I will {lesson2}," said {friend}. | Everyone was {glad}, and {hero} never forgot to {lesson}. | It is not always
    easy to {lesson}, but {hero} knew now that it was worth it.
end: {later} they all went home and ate {yummy} {foods}. | That night, {hero} fell asleep with {his} {thing} and
    dreamed that {he} could {dream}. | They were {glad}, and so was {pet} the {animal}. | {hero} and {friend}
    [stayed/were/became] best friends for ever. | {pet} the {animal} {sound} {how}, and everybody laughed. | {His}
    {elder} said good night and put out the {color2} lamp. "Tomorrow you can play {play} again," {elder_he} whispered.
    | "What was the best thing today?" asked {his} {elder}. "The {color} {thing}," {told} {hero} {how}. | And every
    time {hero} saw a {color} {thing}, {he} thought of {friend}. | When {weather_ends}, {hero}, {friend} and {pet}
    were still playing {play}.
pet: {hero} had a {animal_look} {animal} named {pet}. | {His} {animal}, {pet}, [came along/slept/followed
    {him}/watched everything] and {sound} {how}. | {pet} the {animal} lived in a {home} nearby and liked {animal_food}
    best. | A {animal_look} {animal} named {pet} {went} behind {him}.
joke: {pet} the {animal} {sound} because {pet} wanted {animal_food}. | Just then they heard a {noise}. It was only
    {pet} the {animal} with {animal_food}. | {pet} {sound}. "{pet} is hungry," said {friend}. They gave {pet}
    {animal_food}. | A {color2} {sight} passed by, but nobody noticed. | The {job} from the {job_place} waved {how}.
"""

PLOTS = """
@opening
? {hero} had a {nice} {color} {thing}, made of {thing_material}. It was a gift from {his} {elder}.
? @pet

{day} {hero} could not find {his} {color} {thing}. | {day} the {color} {thing} was gone. | {day} {hero} wanted {his}
    {color} {thing}, but it was not {spot2}, where {he} had left it.
@worry
"{Oh}! Have you seen my {thing}?" {he} asked {friend}. "No," {told} {friend}, "but I will help you." | "Where did you
    have it last?" asked {his} {elder}. "{In_place}," {told} {hero}. | {friend} came and said, "Let us look for it
    together."
They {looked} {spot2}. There was only a {old} {thing2}. | {hero} {looked} {spot2}, and {friend} {looked} {spot3}.
    Nothing! | First they {looked} {spot2}, then {spot3}. They found {n} {foods} and a {old} {wear}, but no {thing}.
? @joke
? @weather

{later} {pet} the {animal} {sound}. {pet} had seen something {spot}. | {later} {friend} remembered that they had
    played {play} {spot}. | {later} {hero} heard a {noise}. It came from somewhere {spot}.
There it was! The {color} {thing} lay {spot}. | {hero} {looked} {spot}, and there was the {thing}, {color} and {nice}
    as before. | And really, {spot} {he} found {his} {color} {thing}.
@thank
? @moral
@end

===
@opening
{hero} wanted to build a {build} out of {material} and {material2}. | "I will make a {color} {build}," {hero} said one
    day. | {day} {hero} and {friend} decided to make a {build}.
? @weather

First {he} needed {material}. The {job} at the {job_place} had some. | They asked the {job}, who knew all about
    {job_thing}, for {n} pieces of {material}. | {hero} {went} to the {shop} and bought {material}, {material2} and
    {n} {color} nails.
"Can you help me?" {hero} asked {friend}. "Of course," {told} {friend}. "I am good with {material}." | {friend}
    brought {material2}, and {pet} the {animal} brought nothing but {animal_food}. | {hero} held the {material}, and
    {friend} worked {how} with the {material2}.
They worked {how} all day. {hero} hurt {his} {body}, but {he} did not stop. | But the {build} was {bit} {old}, and
    with a {noise} it fell down. | After {n} hours the {build} was still {bit} crooked.
@worry

? "Let us try again," said {friend}. "This time we need more {material2}." | "It needs more {material2}," {his}
    {elder} {told} {how}.
{later} the {build} was ready. They painted it {color}, {hero}'s favorite color. | {later} the {color} {build} stood
    {in_place}, and it was {nice}. | {later} it was done: a {size} {color} {build} of {material} and {material2}.
Even the {job} came from the {job_place} to see it. | Everyone came to look at the {build}. "How {nice}!" they {said}.
    | {pet} the {animal} was the first to try it, and {sound} {how}.
? @weather_end
@thank
@moral

===
@opening
? @hobby_talk

{day} {hero} {went} through {place}. {weather_says}. | {day} {hero} and {friend} were playing {play} {in_place}. |
    {day} {hero} was alone {in_place}, among {place_sight}.
Suddenly {he} heard a {noise} {spot}. | Then {he} heard a {size} {noise}. What was it? | {He} {looked} {spot} because
    something {sound}.
It was a {animal_look} {animal}! It was {upset}, and its {body} was hurt. | A {animal} sat there. It {sound} {how}
    because it was {upset} and {wet}. | There was a {animal_look} {animal} that could not find its {home}.

"{Oh}! Do not be {upset}," {hero} said {how}. "I will help you." | {hero} was {bit} {upset} too, but {he} wanted to be
    {trait}. | "Poor {animal}!" {said} {hero}. "Are you hungry?"
{He} gave the {animal} {animal_food} and called it {pet}. | {hero} wrapped the {animal} in {his} {color2} {wear} and
    gave it {animal_food}. "I will call you {pet}," {he} said. | {He} {went} home and came back with {animal_food}.
    The {animal} ate {how}. "You look like a {pet}," said {hero}.
{friend} knew the {job} at the {job_place}, who looked at the {body} of {pet}. | {His} {elder} said, "{pet} can stay
    until {weather_ends}." | For {n} days {hero} took care of {pet} every morning.
? Every morning {pet} {sound}, and {hero} brought {animal_food}. | {friend} came every day to play with {pet}.

{later} {pet} was well again and wanted to go back to the {home}. | {later} they took {pet} back to the {home} near
    {place}. | {later} they found the {home}, and {pet} {sound} {how}.
{hero} was {upset} and {glad} at the same time. | "Goodbye, {pet}," said {hero} and waved with {his} {color2} {wear}.
    | {pet} {went} away but turned around once and {sound}.
? Later, whenever {hero} came to {place}, a {animal} {sound}, and {hero} knew that it was {pet}.
@moral

===
@opening
@weather

{hero} had {n} {foods}. {friend} had {m} {foods}. | In {his} basket {hero} had {n} {yummy} {foods}, and {friend}
    brought {m} more. | {His} {elder} gave {hero} {n} {foods}, and {friend} got {m}.
"How many {foods} do we have together?" asked {friend}. {hero} counted {how}. "{Sum}!" {he} {said}. | They counted:
    {n} and {m} make {sum}. | Together they had {sum} {yummy} {foods}.
They sat down {spot} and began to eat. | "Let us go to {place} and eat them there," {friend} {told}. | They {went} to
    {place} and sat down near {place_sight}.

Then {pet} the {animal} came and {sound}. {pet} wanted a {food}, too. | Along came the {job} from the {job_place}, who
    was {bit} {upset} and very hungry. | {Oh}! A {animal} took {few} of the {foods} and {went} away.
{Few} {foods} were gone. "Now there are only {left}," {hero} {told}. | They gave away {few} {foods}, and {left} were
    left. | From {sum} {foods} {few} were missing. That left {left}.
? "That is not fair!" {said} {friend}. {He2} was {upset}. | {hero} wanted all the {foods} for {himself}. That was
    {bad}. | "Do not be {bad}, {friend}," {said} {hero}.
? @worry

"We can share," {hero} {told}. "{Left} {foods} are enough for us." | {later} they shared the {left} {foods}, and
    nobody was {upset}. | {hero} gave {friend} the biggest {food}. It was {yummy} and {yummy}.
@thank
@moral
? @end

===
@opening
{hero} was afraid of [the dark/dogs/thunder/deep water/heights/loud noises/spiders/strangers]. {He} felt {upset} when
    {he} thought of it. | {hero} was {trait}, but at night {he} was {upset}. | {hero} did not like the {room}. It was
    dark there, and something went {noise}.

{day} {his} {elder} said, "Please bring me the {color} {thing} from the {room}." | {day} {hero}'s {color} {thing} fell
    down {spot}. It was very dark there. | {day} the light went out. {weather_says}. "Who will get the {thing} from
    the {room}?" asked {friend}.
{hero} {went} {how} to the door. {Noise}! What was that? | {He} took one step, then another. {Noise}! went something
    {spot}. | {His} {body} was cold, and {he} could hear a {noise}.
@worry
"Take my hand," said {friend}. "We will go together." | "Sing a song," said {his} {elder}. "That always helps me." |
    "Count to {n}," {friend} whispered. So {hero} counted to {n}.

{later} {hero} opened {his} eyes. The {noise} came from {pet} the {animal}! | They {looked} {spot}. It was only {pet},
    {his} {animal}, who {sound}. | And who was sitting {spot}? A {animal_look} {animal} with {animal_food}. It was
    {pet}!
{hero} laughed. "I was afraid of a {animal}!" {he} {said}. | "You gave me a fright, {pet}," {said} {hero} {how}. |
    {friend} laughed, and {hero} laughed, too.
{He} took the {color} {thing} and {went} back. | {His} {elder} was {glad} to have the {color} {thing}. | Now the
    {room} was not so bad, and {hero} held the {thing} {how}.
? @hobby_talk
@moral
? @end

===
@opening
? @pet

It was {hero}'s birthday. {He} was {n} years old. | {day} it was {friend}'s birthday. {hero} wanted to give {him2} a
    {gift}. | The next day {his} {elder} would have a birthday, and {hero} had no gift.
{He} {went} to the {shop}. There were a {color} {thing}, a {nice} {thing2} and many {foods}. | {hero} counted {his}
    coins. There were {n}, but the {color} {thing} cost {sum}. | {hero} saw a {nice} {color} {thing} in the window of
    the {shop}. It cost {sum} coins, and {he} had only {n}.
"I have only {n} coins. I need {m} more," {he} {said}. | {He} needed {m} more coins, for {n} and {m} make {sum}. |
    {hero} was {upset} because {m} coins were missing.

? The {job} said, "Help me at the {job_place}, and I will give you {m} coins." So {hero} carried {job_thing} all day.
    | So {hero} {went} to the {job_place} and helped the {job} with the {job_thing}. For that {he} got {m} coins. |
    {friend} gave {him} {few} coins, and {his} {elder} gave {him} the rest.
? @joke
{later} {he} had {sum} coins and bought the {color} {thing}. | {later} {hero} came back from the {shop} with a {color}
    {thing} in {nice} paper. | {later} {hero} made a {gift} out of {material} and {material2} instead.
? @weather

There was a party with {foods}, {foods2} and {hobby}. | Everybody came: {friend}, {pet} the {animal}, the {job} and
    {his} {elder}. | They ate {yummy} {foods} and played {play}.
"This is the best gift of all," {said} {his} {elder}. | "How did you know that I like {color}?" asked {friend}. "You
    told me," {told} {hero}. | Everyone was {glad}. The {color} {thing} was really {nice}.
@thank
@end

===
@opening
{friend} was the fastest {in_place}, and {he2} was {bit} proud of it. | Every year there was a race from {place} to
    the {job_place}. | {hero} and {friend} both wanted to win the {color} {thing}.

{day} there was a contest in {hobby}. The prize was a {nice} {color} {thing}. | "I will win the race," {said}
    {friend}. "You are too slow, {hero}." | {day} the {job} said, "Who comes first to {place} and back gets this
    {color} {thing}."
{weather_says}, so the road was {wet}. | {hero} practiced {how} for {n} days. {His} {elder} helped {him}. | {hero} was
    {upset}, but {his} {elder} said, "Just try."
One, two, three, go! {friend} {went} {how} past a {sight}. {hero} {went} behind {him2}. | They {went} past a {sight},
    a {sight2} and {n} {color2} {things2}. | {friend} was first, {hero} was second, and {pet} the {animal} was last.

Suddenly there was a {noise}. {friend} fell and hurt {his2} {body}. | But {friend} lay down {spot} to sleep. {He2} was
    so sure to win. | Halfway {friend} stopped to eat {yummy} {foods} {spot}.
"{Oh}! Are you hurt?" {hero} {said} and stopped. | {hero} could win now. But {he} saw that {friend} was {upset}. |
    {hero} {went} on and on and did not look back. Only {pet} {sound}.
"Go on, you can win," {told} {friend}. "No," said {hero}, "friends are more important." | {later} {hero} helped
    {friend} up, and they {went} on together, hand in hand. | {later} {hero} came first, and {friend} came {how} after
    {him}.
? @weather_end

They both got the {color} {thing}. | The {job} gave {hero} the {color} {thing}, and {he} shared it with {friend}. |
    {hero} won the {color} {thing}, and {friend} said sorry.
@thank
@moral

===
@opening
{His} {elder} had a garden behind the {room}. | {hero} found {n} {plant} seeds {spot}. | {day} the {job} gave {hero}
    {n} {size} seeds. "They will be {plants}," said the {job}.

{hero} put {n} seeds into the earth, gave them water and waited. | {He} planted the {plant} seeds next to the {tree}
    and sang to them. | {friend} dug {n} holes, and {hero} put one {plant} seed in each.
The next day nothing had happened. {hero} was {upset}. | "When will they grow?" {he} asked {how}. "Be patient," {told}
    {his} {elder}. | Every morning {he} {looked}, but there was nothing but [brown/wet/dark/bare] earth.
@weather
{pet} the {animal} came by and {sound}. "Do not step on my seeds!" {said} {hero}. | But {pet} the {animal} ate {few}
    of the {n} seeds. | A {bad} {animal} named {pet} dug up {few} seeds and {went} away.
? @worry

{later} {weather_ends}, and a {size} green leaf came out of the earth. | {later} there was something green next to the
    {tree}. | {later} {friend} {said}, "{hero}, come {how}! Look!"
Day after day it grew: first to {his} {body}, then to {his} {body2}. | In summer there were {color} {plants}, so
    {nice} that even the {job} came from the {job_place} to see them. | Soon the {color} {plants} were as tall as
    {friend}.
{hero} gave one {plant} to {his} {elder} and one to {friend}. | They took the {plants} to the {shop} and got {m}
    {foods} for them. | "You were {trait} and {trait2}," said {his} {elder}.
@moral
? @end

===
@opening
? @place

"Do not go to {place} alone," {his} {elder} said, "and do not touch the {color} {thing}." | "Stay near the house,
    {hero}," said {his} {elder}. "{weather_says}." | {His} {elder} told {him} to put on {his} {wear} because of the
    {weather}.
But {hero} did not listen. {He} {went} {how} out of the {room}. | "Yes," {told} {hero}, but {he} thought of {place},
    of {place_sight} and {place_sound}. | {hero} promised it {how}. But one day {he} forgot it.

@go
@place
? @weather
Then it happened. {Noise}! The {thing_part} of the {color} {thing} broke. | Soon {he} did not know the way any more.
    Everywhere were {place_sight}. | {He} slipped, fell on {his} {body} and dropped the {color} {thing}. Now it was
    {wet} and broken.
@worry
"I should have listened," {he} {said}. "Help! {friend}!" | {He} sat down {spot} and cried. | {hero} wanted to go home,
    but {his} {body} hurt.

{later} {friend} heard {him}. {friend} had seen {hero}'s {color2} {wear} {in_place}. | {later} {pet}, the {animal} of
    the {job}, found {him} and {sound}. | {later} {his} {elder} came with a lamp and found {him} {spot}.
"{Oh}! There you are," {said} {his} {elder}. {Elder_he} was {upset} but also {glad}. | "I am sorry," said {hero}. "I
    did not {lesson}." | Together they {went} home, away from {place_sight} and {place_sound}.
? At home there were {yummy} {foods} and a warm {wear}. | They mended the {thing_part} of the {thing} with {material}
    and {material2}.
@moral

===
@opening
{hero}'s {color} {thing} was {old}. The {thing_part} was broken. | {day} {friend} [dropped/sat on/threw] {hero}'s
    {color} {thing}. {Noise}! The {thing_part} broke. | {hero} had a {color} {thing} of {thing_material}. {He}
    [{thing_did}/{thing_did}/loved] it every day, until the {thing_part} broke.

@worry
"It was not me!" {said} {friend}. But that was not true. | {friend} wanted to hide the {thing} {spot}. Then {he2}
    thought again and told {hero} the truth. | "I am so sorry, {hero}," {friend} {told}. {He2} looked {upset}.
? "You are {bad}!" {said} {hero} and {went} away. {He} did not want to play {play} with {friend} any more. | For {n}
    days they did not talk to each other.
"Who can mend it?" asked {hero}. "Perhaps the {job}," {told} {his} {elder}. | They took {material} and {material2} and
    tried to mend it, but it was hard. | They {went} with the {thing} to the {job} at the {job_place}.

The {job} took a {size} needle, {material} and {material2}. | "For a {thing} of {thing_material} I need {material},"
    said the {job}. {friend} {went} {how} to the {shop} to get it. | The {job} put down the {job_thing} and looked at
    the {thing_part}.
? @joke
? @weather
{later} the {thing_part} was whole again, and it was even {nice}. | {later} {hero} {thing_did} the {color} {thing} as
    before. | {later} the {thing} had a new {thing_part}. It was {color2}, and the rest was {color}.
"It is even better than before," {hero} {told}. | {hero} was {glad}, and {friend} was {glad}, too. | "Friends are more
    important than a {thing}," said {hero}.
@moral
? @end

===
@opening
A new {kind2} came to {hero}'s [school/street/village/class]. {His2} name was {friend}. | {day} a {kind2} named
    {friend} moved into the {color} house next to {place}. | {friend} was new {in_place}. {He2} had a {color2} {wear}
    and knew nobody.
? @weather

Nobody played with {friend}. {He2} sat alone {spot}. | {friend} was {bit} {upset}, for {he2} missed {his2} old home
    near the {job_place}. | The others laughed at {friend}'s {color2} {wear}. {He2} was {upset}.
{hero} thought, "I would be {upset}, too." So {he} {went} to {him2}. | {hero} saw it and {went} {how} to {friend}. |
    {His} {elder} said, "Why do you not ask {friend} to play?"
"Hello, I am {hero}. What do you like?" "{Hobby}," {told} {friend}. | "Do you want to see my {color} {thing}?" {hero}
    asked. "Yes!" {told} {friend}. | "Do you know how to play {play}?" asked {hero}. "No," said {friend}. "Then I will
    show you."
? @pet
? @joke

They {went} to {place}, where {friend} saw {place_sight} for the first time. | They sat {spot}, ate {n} {foods} and
    talked about {hobby}. | {friend} showed {him} a {nice} {thing2}, and {hero} showed {him2} {his} {color} {thing}.
"At my old home there was a {animal} that {sound}," told {friend}. "Its name was {pet}." | {friend} was good at
    {hobby2}, and {hero} was good at {hobby}. They taught each other. | Soon the others came, too, and all of them
    played {play}.
{later} {friend} was not {upset} any more. | {later} {friend} said, "Now I have a friend." | {later} nobody laughed
    about the {color2} {wear} any more. Everybody wanted one.
@moral
@end

===
@opening
{day} {hero}, {friend} and {his} {elder} made a trip to {place}. | {hero} had always wanted to {dream}. {day} {his}
    {elder} said, "Let us at least go to {place}." | {day} the whole family wanted to go to {place}.
They packed {n} {foods}, a {color} {thing}, a {wear} and {material}. | {hero} packed {his} {color} {thing}, and
    {friend} packed {n} {foods}. | Into the {color2} bag they put {foods}, {foods2}, a {thing} and a {thing2}.
? @weather

On the way they saw a {sight}, a {sight2} and {m} {animals}. | They sat in the train and played {play}. Outside was a
    {sight}, then a {color2} {sight2}. | "Are we there yet?" {friend} asked {times}. "Not yet," {told} {his} {elder}
    {times}.
@place
? They {went} around, and {hero} held {his} {color} {thing} in {his} hand. | {hero} {thing_did} the {thing}, and
    {friend} collected {material}.
Then, with a {noise}, the {color} {thing} fell down {spot}! | When they wanted to eat, the {foods} were gone. A
    {animal} had taken them. | Suddenly {friend} was gone. {hero} {looked} {spot}, but {friend} was not there.
@worry

{later} a {trait} {job} came and helped them. | {later} {pet}, the {animal} of a {job}, {sound} and showed them where
    to look: {spot}. | {later} they found what they were looking for, {spot}.
The {job} from the {job_place} gave them {job_thing} and {yummy} {foods2}. | "I am the {job} here," said a friendly
    voice. "I know every corner." | They thanked the {job} and {went} home.
@weather_end
"What did you like best?" asked {his} {elder}. "The {sight}," {told} {hero}. "{Place_sound}," {told} {friend}. | At
    home {hero} drew a picture of {place} with {place_sight} and a {sight}. | "That was almost as good as if I could
    {dream}," {told} {hero}.
@end

===
@opening
{day} {his} {elder} was ill [and lay in bed/and could not get up/and had a sore throat]. | {day} {hero} heard that
    {his} {elder} was ill. | {day} {his} {elder} had a cold and felt {upset}.
@worry

"I will make soup," thought {hero}. {He} took {n} {foods}, {m} {foods2} and a pot. | "Perhaps the {job} knows what
    helps," {told} {friend}, and they {went} to the {job_place}. | {hero} {went} to {place}, because there grew the
    {plant} that helps when someone's {body} hurts.
? @weather
? @place
The {job} gave {him} {material}, {job_thing} and a {nice} {plant}. | On the way {he} met a {job}. "Take this {plant},"
    said the {job}. "Cook it for {n} minutes." | {He} cut the {foods} {how}. {Noise}! The pot fell down, and {hero}
    began again.

{later} the soup was ready. It was {bit} {yummy}. | {hero} brought {his} {elder} the {plant} and a {color} {thing},
    and read a story about a {job} and a {animal}. | {He} sat by the bed and told of a {kind2} who could {dream}.
Every day it got better: first the {body}, then the {body2}. | The next day was better. After {n} days everything was
    well. | {later} there was a smile again.
"You are my little doctor, {hero}," said {his} {elder}. | {His} {elder} was {glad} and [could play/could sing/laughed]
    again. | {pet} the {animal} {sound} {how}, for {his} {elder} was well again.
@moral
? @end

===
@opening
{hero} knew how to do only one thing: {hobby}. | Everybody {in_place} laughed about {hero} because {he} was always
    {hobby}. | "What is {hobby} good for?" asked {friend}. {hero} did not know.
? @hobby_talk

{day} the {job} came {how} out of the {job_place}. "{Oh}! My {thing} is gone!" | {day} {weather_says_low}, and {pet}
    the {animal} was stuck {spot}. | {day} the king came to {place} and wanted to see something {nice}.
Nobody knew what to do. The {job} tried it with {material}, {friend} tried it with {material2}. | The strongest of all
    pulled {how}, but it was no use. | {friend} {went} here and there and was {upset}.
? @worry
"Let me try," said {hero}. "But you only know {hobby}!" {said} the {job}. | Then {hero} had an idea. For it {he}
    needed {n} {color} {things} and {material}. | "Perhaps {hobby} can help," {hero} told {friend} {how}.

And what do you think? {later} it worked! | {later} {pet} came out {spot2} and {sound}. It was because of the {hobby}.
    | {Noise}! {later} everything was good again.
"That was [wonderful/great/clever/amazing]!" {said} the {job} and gave {hero} {job_thing}. | Now everyone wanted to
    learn {hobby}, even the {job} and {friend}. | "Never again will I laugh about {hobby}," said {friend}.
? @weather_end
@moral
@end
"""

# ------------------------------------------------------------------------------------------------------------- telling

IRREGULAR = {"mouse": "mice", "goose": "geese", "deer": "deer"}
PRONOUNS = {"girl": ("she", "her", "her", "herself"), "boy": ("he", "him", "his", "himself")}


class Falling:
    """A list to draw from; the r-th item, from 0, has weight 1 / (r + 3)."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)
        self._bounds = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(self.items))))
        self._total = self._bounds[-1]

    def draw(self, rng: random.Random) -> Any:
        return self.items[bisect.bisect(self._bounds, rng.random() * self._total)]

    def draw_distinct(self, rng: random.Random, count: int) -> list[Any]:
        drawn: dict[Any, None] = {}
        while len(drawn) < count:
            drawn[self.draw(rng)] = None
        return list(drawn)


class Slot(NamedTuple):
    """`{name}` of a template: a value of the world, else a word drawn from the list of that name."""

    name: str
    capital: bool


# A template is a list of literal text, slots, and `[a/b]` choices between templates.
Part = str | Slot | Falling
NOTATION = re.compile(r"\{(\w+)\}|\[([^\]]*)\]")


def _template(text: str) -> list[Part]:
    parts: list[Part] = []
    end = 0
    for match in NOTATION.finditer(text):
        parts.append(text[end : match.start()])
        end = match.end()
        name, choice = match.groups()
        if choice is not None:
            parts.append(Falling(_template(option) for option in choice.split("/")))
        else:
            lower = name[0].lower() + name[1:]
            parts.append(Slot(lower, lower != name))
    parts.append(text[end:])
    return [part for part in parts if part != ""]


def _alternatives(text: str) -> Falling:
    return Falling(_template(option) for option in text.split(" | "))


class Line(NamedTuple):
    """A line of a plot; optional ones are left out twice in five times."""

    optional: bool
    alternatives: Falling


def _unwrap(text: str) -> str:
    return text.replace("\n    ", " ").strip()


def _plot(text: str) -> list[list[Line]]:
    """Paragraphs of lines."""
    shared = dict(line.split(": ", 1) for line in _unwrap(SHARED).splitlines())
    paragraphs = []
    for paragraph in _unwrap(text).split("\n\n"):
        lines = []
        for line in paragraph.splitlines():
            body = line.removeprefix("? ")
            body = shared[body[1:]] if body.startswith("@") else body
            lines.append(Line(line.startswith("? "), _alternatives(body)))
        paragraphs.append(lines)
    return paragraphs


FRESH = {name: Falling(LISTS[name]) for name in LISTS}
PLOT_LINES = [_plot(text) for text in PLOTS.split("===")]
DRAWN = {
    "girl": Falling(GIRLS),
    "boy": Falling(BOYS),
    "pet": Falling(PETS),
    "animal": Falling(ANIMALS),
    "thing": Falling(THINGS),
    "place": Falling(PLACES),
    "weather": Falling(WEATHERS),
    "food": Falling(FOODS),
    "job": Falling(JOBS),
    "spot": Falling(SPOTS),
    "elder": Falling(ELDERS),
}
# how many different words of a list a world holds; they are called color, color2, ... and stay the same in a story
KEPT = {
    "color": 2,
    "hobby": 2,
    "play": 2,
    "plant": 1,
    "tree": 1,
    "wear": 1,
    "body": 2,
    "room": 1,
    "material": 2,
    "build": 1,
    "gift": 1,
    "shop": 1,
    "dream": 1,
    "sight": 2,
    "lesson": 2,
    "upset": 1,
}


def _plural(noun: str) -> str:
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def _world(rng: random.Random) -> dict[str, str]:
    """Everything that stays the same within a story, by slot name."""
    world: dict[str, str] = {}
    for name, count in KEPT.items():
        for number, word in enumerate(FRESH[name].draw_distinct(rng, count), 1):
            world[name if number == 1 else f"{name}{number}"] = word
    world["trait"], world["trait2"] = FRESH["good"].draw_distinct(rng, 2)

    hero, friend = rng.choice(("girl", "boy")), rng.choice(("girl", "boy"))
    names = {kind: DRAWN[kind].draw_distinct(rng, 2) for kind in ("girl", "boy")}
    animal, hero_animal = DRAWN["animal"].draw_distinct(rng, 2)
    for suffix, kind, name in (("", hero, names[hero][0]), ("2", friend, names[friend][1])):
        he, him, his, himself = PRONOUNS[kind]
        world |= {f"he{suffix}": he, f"him{suffix}": him, f"his{suffix}": his, f"himself{suffix}": himself}
        world |= {"friend" if suffix else "hero": name, "kind" + suffix: kind}
    if rng.random() < 0.15:  # a fable; the pronouns stay those of the name
        world["kind"] = hero_animal[0]
    world["elder"], world["elder_he"] = DRAWN["elder"].draw(rng)
    world["pet"] = DRAWN["pet"].draw(rng)
    for field, value in zip(("animal", "sound", "animal_food", "home", "animal_look"), animal, strict=True):
        world[field] = value
    thing, thing2 = DRAWN["thing"].draw_distinct(rng, 2)
    world["thing"], world["thing_did"], world["thing_material"], world["thing_part"] = thing
    world["place"], world["in_place"], world["place_sight"], world["place_sound"] = DRAWN["place"].draw(rng)
    world["weather"], says, world["wet"], world["weather_ends"] = DRAWN["weather"].draw(rng)
    world["weather_says"], world["weather_says_low"] = says, says[0].lower() + says[1:]
    (world["food"], world["foods"]), (_, world["foods2"]) = DRAWN["food"].draw_distinct(rng, 2)
    world["job"], world["job_place"], world["job_thing"] = DRAWN["job"].draw(rng)
    world["spot"], world["spot2"], world["spot3"] = DRAWN["spot"].draw_distinct(rng, 3)
    world["thing2"], world["things2"], world["things"] = thing2[0], _plural(thing2[0]), _plural(thing[0])
    world["animals"], world["plants"] = _plural(animal[0]), _plural(world["plant"])

    # the sums come out: sum = n + m, left = sum - few, few < n
    n, m = rng.randint(3, 8), rng.randint(2, 6)
    few = rng.randint(2, n - 1)
    for name, value in {"n": n, "m": m, "few": few, "sum": n + m, "left": n + m - few}.items():
        world[name] = NUMBERS[value]
    world["times"] = TIMES[m]
    return world


def _tell(template: list[Part], world: dict[str, str], rng: random.Random, told: list[str]) -> None:
    """Append the pieces of a sentence to `told`."""
    for part in template:
        if isinstance(part, str):
            told.append(part)
        elif isinstance(part, Falling):
            _tell(part.draw(rng), world, rng, told)
        else:
            word = world[part.name] if part.name in world else FRESH[part.name].draw(rng)
            told.append(word[0].upper() + word[1:] if part.capital else word)


ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|honest)")


def story(seed: int, index: int) -> str:
    """Story `index` of `seed`: paragraphs with a '\n' between them, about 100 to 200 words."""
    # hashed: two integers as seeds can give the same stream, as 257 and 257 + 256 * 2**32 do
    rng = random.Random(f"{seed} {index}")
    world = _world(rng)
    paragraphs = []
    for lines in rng.choice(PLOT_LINES):
        told: list[str] = []
        for line in lines:
            if line.optional and rng.random() < 0.4:
                continue
            _tell(line.alternatives.draw(rng), world, rng, told)
            told.append(" ")
        if told:
            paragraphs.append("".join(told[:-1]))
    return ARTICLE.sub(r"\1n ", "\n".join(paragraphs))


def stories(seed: int, start: int = 0) -> Iterator[str]:
    """story(seed, start), story(seed, start + 1), ... without end; ranges that do not overlap draw apart."""
    return (story(seed, index) for index in itertools.count(start))
