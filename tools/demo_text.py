"""The words, phrasings, facts and story parts that `demo_data` combines. Nothing but literals."""

from __future__ import annotations

WORDS = """
apple pear plum grape lemon melon cherry banana orange peach bread butter cheese honey sugar salt pepper rice soup
cake milk water juice coffee tea egg onion potato carrot bean garlic dog cat horse cow pig sheep goat duck goose hen
mouse rabbit fox wolf bear lion tiger zebra monkey snake frog fish whale shark eagle owl crow robin bee ant spider
tree leaf root branch flower rose grass forest river lake ocean beach island mountain hill valley desert field garden
rain snow wind storm cloud thunder sun moon star sky earth fire stone sand mud ice house door window wall roof floor
kitchen table chair bed lamp mirror clock carpet shelf box basket bottle cup plate bowl spoon fork knife pan pot oven
book page pen pencil paper letter word story song music drum piano violin flute dance game ball kite doll puzzle
car bus train plane boat ship bike wheel engine road street bridge tunnel station city village farm market school
shop bank church castle tower king queen prince knight doctor teacher farmer baker sailor pilot artist singer friend
mother father sister brother baby child uncle hand foot arm leg head eye ear nose mouth tooth hair heart
shirt coat hat shoe sock glove scarf dress belt ring red blue green yellow black white brown pink purple grey
big small long short tall old young new fast slow hot cold warm cool hard soft loud quiet happy sad angry brave
clever kind lazy funny strong weak rich poor clean dirty dark bright empty full heavy light sweet sour
run walk jump swim fly climb sit stand sleep eat drink cook read write draw paint sing play work rest open close push
pull throw catch carry build break find lose buy sell give take send bring ask tell think know learn teach help love
morning evening night day week month year spring summer autumn winter today north south east west left right
gold silver iron glass wood cotton silk wool key lock map flag rope hammer nail ladder candle pocket umbrella
ticket travel under over and the with near very many quick jelly vase yacht zero violet umpire velvet jacket
""".strip()

SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu "
    "pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi ya yo za ze zi zo "
    "ban dor fin gal hem jun kel lin mar nor pim ras sol tan ven wil xan yor zan bra cro dri fle gru pla sto tri"
)

NAMES = (
    "Maria Tom Anna Peter Lena Max Sara Paul Emma Ben Nina Leo Julia Mark Olga Ivan Alice Bob Clara David Eva Felix "
    "Greta Hugo Ida Jonas Kate Luis Mia Noah Oscar Rosa Sam Tina Victor Wendy Yusuf Zoe Omar Priya Chen Aisha Hans "
    "Laura Simon Carla Daniel Fiona Lucy Adam"
)

CITIES = (
    "Oslo Paris Berlin Rome Madrid London Vienna Prague Lisbon Dublin Athens Warsaw Bern Cairo Tokyo Delhi Lima Boston "
    "Chicago Toronto Sydney Dallas Hamburg Munich Milan Porto Seville Lyon Turin Bergen Zurich Geneva Krakow Kyoto "
    "Nairobi Havana Moscow Helsinki Seoul Denver"
)

COLOURS = "red blue green yellow black white brown pink purple orange"
ITEMS = "apples pears plums lemons books pens cups plates hats shoes balls boxes chairs stamps coins cards"
PETS = "dog cat horse rabbit mouse duck goat hamster parrot turtle"

ADD_PHRASINGS = (
    "{a} + {b}",
    "{a}+{b}",
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "And {a} + {b}?",
    "What's {a} + {b}?",
    "{a} + {b} =",
    "{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?",
)
SUBTRACT_PHRASINGS = (
    "{a} - {b}",
    "{a}-{b}",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "Please subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "And {a} - {b}?",
    "What's {a} - {b}?",
    "{a} - {b} =",
    "Take {b} away from {a}.",
    "{name} has {a} {item} and gives away {b}. How many {item} does {name} have left?",
)
TIMES_PHRASINGS = (
    "{a} * {b}",
    "{a} x {b}",
    "What is {a} * {b}?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Compute {a} * {b}.",
    "How much is {a} times {b}?",
    "What's {a} x {b}?",
    "And {a} times {b}?",
    "What is the product of {a} and {b}?",
)
COMPARE_PHRASINGS = (
    (
        "Which is larger, {a} or {b}?",
        "Which is bigger, {a} or {b}?",
        "Which number is larger: {a} or {b}?",
        "What is more, {a} or {b}?",
        "Is {a} or {b} larger?",
        "Tell me the larger of {a} and {b}.",
    ),
    (
        "Which is smaller, {a} or {b}?",
        "Which number is smaller: {a} or {b}?",
        "What is less, {a} or {b}?",
        "Is {a} or {b} smaller?",
        "Tell me the smaller of {a} and {b}.",
    ),
)
SORT_WORD_PHRASINGS = (
    "Sort these words: {list}",
    "Sort the words: {list}",
    "Sort: {list}",
    "Sort {list}",
    "Sort alphabetically: {list}",
    "Sort these words alphabetically: {list}",
    "Please sort these words: {list}",
    "Put these words in alphabetical order: {list}",
    "Put in alphabetical order: {list}",
    "Can you sort these words? {list}",
    "What is the alphabetical order of {list}?",
)
SORT_UP_PHRASINGS = (
    "Sort these numbers: {list}",
    "Sort the numbers: {list}",
    "Sort: {list}",
    "Sort {list}",
    "Please sort these numbers: {list}",
    "Sort from smallest to largest: {list}",
    "Sort these numbers from smallest to largest: {list}",
    "Put these numbers in order: {list}",
    "Can you sort these numbers? {list}",
)
SORT_DOWN_PHRASINGS = (
    "Sort from largest to smallest: {list}",
    "Sort these numbers from largest to smallest: {list}",
    "Sort in descending order: {list}",
    "Put these numbers in descending order: {list}",
)
REVERSE_PHRASINGS = (
    "Reverse these words: {list}",
    "Reverse the words: {list}",
    "Reverse: {list}",
    "Reverse {list}",
    "Reverse the list: {list}",
    "Reverse the order of these words: {list}",
    "Please reverse these words: {list}",
    "Say these words backwards: {list}",
    "Write these words in reverse order: {list}",
    "Can you reverse these words? {list}",
)
COUNT_PHRASINGS = (
    "How many words are in this sentence: {text}",
    "How many words are in: {text}",
    "How many words are there in: {text}",
    "Count the words: {text}",
    "Count the words in this sentence: {text}",
    "Count these words: {text}",
    "Please count the words: {text}",
    "How many words are here? {text}",
    'How many words are in "{text}"?',
    "Word count: {text}",
)
REPEAT_PHRASINGS = (
    "Repeat: {text}",
    "Repeat after me: {text}",
    "Please repeat: {text}",
    "Say: {text}",
    "Say this again: {text}",
    "Copy these words: {text}",
    "Repeat these words: {text}",
)

FACTS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    "capital": (
        (
            "What is the capital of {s}?",
            "Capital of {s}?",
            "Which city is the capital of {s}?",
            "Tell me the capital of {s}.",
            "Name the capital of {s}.",
            "What's the capital of {s}?",
            "Do you know the capital of {s}?",
            "And the capital of {s}?",
        ),
        "The capital of {s} is {v}.",
        {
            "France": "Paris",
            "Germany": "Berlin",
            "Italy": "Rome",
            "Spain": "Madrid",
            "Norway": "Oslo",
            "Austria": "Vienna",
            "Portugal": "Lisbon",
            "Ireland": "Dublin",
            "Greece": "Athens",
            "Poland": "Warsaw",
            "Egypt": "Cairo",
            "Japan": "Tokyo",
            "Peru": "Lima",
            "Finland": "Helsinki",
            "Cuba": "Havana",
            "Kenya": "Nairobi",
        },
    ),
    "sound": (
        (
            "What sound does a {s} make?",
            "What does a {s} say?",
            "Which sound does a {s} make?",
            "How does a {s} sound?",
            "Tell me the sound of a {s}.",
            "What noise does a {s} make?",
            "And what does a {s} say?",
        ),
        "A {s} says {v}.",
        {
            "dog": "woof",
            "cat": "meow",
            "cow": "moo",
            "duck": "quack",
            "sheep": "baa",
            "pig": "oink",
            "horse": "neigh",
            "lion": "roar",
            "bee": "buzz",
            "crow": "caw",
            "hen": "cluck",
            "mouse": "squeak",
        },
    ),
    "opposite": (
        (
            "What is the opposite of {s}?",
            "Opposite of {s}?",
            "Tell me the opposite of {s}.",
            "Name the opposite of {s}.",
            "What's the opposite of {s}?",
            "Which word is the opposite of {s}?",
            "And the opposite of {s}?",
        ),
        "The opposite of {s} is {v}.",
        {
            "big": "small",
            "small": "big",
            "hot": "cold",
            "cold": "hot",
            "old": "young",
            "young": "old",
            "fast": "slow",
            "slow": "fast",
            "happy": "sad",
            "sad": "happy",
            "dark": "bright",
            "open": "closed",
            "full": "empty",
            "empty": "full",
            "rich": "poor",
            "hard": "soft",
            "left": "right",
            "up": "down",
            "day": "night",
            "long": "short",
        },
    ),
    "colour": (
        (
            "What colour is {s}?",
            "What color is {s}?",
            "Which colour does {s} have?",
            "Tell me the colour of {s}.",
            "Which color is {s}?",
            "What is the colour of {s}?",
            "And what colour is {s}?",
        ),
        "The colour of {s} is {v}.",
        {
            "grass": "green",
            "snow": "white",
            "the sky": "blue",
            "a banana": "yellow",
            "a tomato": "red",
            "coal": "black",
            "chocolate": "brown",
            "a carrot": "orange",
            "the sun": "yellow",
            "a cherry": "red",
        },
    ),
    "after": (
        (
            "What comes after {s}?",
            "What is after {s}?",
            "Which comes after {s}?",
            "Tell me what comes after {s}.",
            "What follows {s}?",
            "And what comes after {s}?",
        ),
        "After {s} comes {v}.",
        {
            "Monday": "Tuesday",
            "Tuesday": "Wednesday",
            "Wednesday": "Thursday",
            "Thursday": "Friday",
            "Friday": "Saturday",
            "Saturday": "Sunday",
            "Sunday": "Monday",
            "January": "February",
            "February": "March",
            "March": "April",
            "April": "May",
            "May": "June",
            "June": "July",
            "July": "August",
            "August": "September",
            "September": "October",
            "October": "November",
            "November": "December",
            "December": "January",
            "spring": "summer",
            "summer": "autumn",
            "autumn": "winter",
            "winter": "spring",
        },
    ),
    "legs": (
        (
            "How many legs does a {s} have?",
            "How many legs has a {s}?",
            "Tell me how many legs a {s} has.",
            "A {s} has how many legs?",
            "Count the legs of a {s}.",
            "And how many legs does a {s} have?",
        ),
        "A {s} has {v} legs.",
        {"dog": "4", "cat": "4", "horse": "4", "cow": "4", "bird": "2", "duck": "2", "bee": "6", "spider": "8"},
    ),
    "measure": (
        (
            "How many {s}?",
            "Tell me how many {s}.",
            "Do you know how many {s}?",
            "Please tell me how many {s}.",
            "And how many {s}?",
        ),
        "There are {v}.",
        {
            "days are in a week": "7 days in a week",
            "months are in a year": "12 months in a year",
            "hours are in a day": "24 hours in a day",
            "minutes are in an hour": "60 minutes in an hour",
            "seconds are in a minute": "60 seconds in a minute",
            "letters are in the alphabet": "26 letters in the alphabet",
        },
    ),
}

PERSON_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} is {age} and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "{name} from {city} is {age} years old.",
    "My name is {name}, I am {age} years old and I live in {city}.",
    "In {city} lives {name}, who is {age} years old.",
)
ORDER_SENTENCES = (
    "I want {count} {color} {item}.",
    "Please send me {count} {color} {item}.",
    "We need {count} {item} in {color}.",
    "The box holds {count} {color} {item}.",
)
PET_SENTENCES = (
    "{owner} has a {animal} called {pet}.",
    "{pet} is the {animal} of {owner}.",
    "{owner} owns a {animal} named {pet}.",
    "The {animal} {pet} belongs to {owner}.",
)
JSON_PHRASINGS = (
    "Fill a JSON object with {fields}: {sentence}",
    "Fill in JSON with {fields}: {sentence}",
    "Extract {fields} as JSON: {sentence}",
    "Give me {fields} as JSON: {sentence}",
    "Make a JSON object from this sentence: {sentence}",
    "Write this sentence as JSON: {sentence}",
    "Turn this into JSON: {sentence}",
    "As JSON: {sentence}",
    "JSON: {sentence}",
    "{sentence} Write that as JSON.",
    "{sentence} Make a JSON object with {fields}.",
)

RECALL_INTRODUCTIONS = (
    "My name is {name}.",
    "I am {name}.",
    "Hello, I am {name}.",
    "Hi, my name is {name}.",
    "Call me {name}.",
    "I'm {name}.",
)
RECALL_QUESTIONS = (
    "What is my name?",
    "What's my name?",
    "Who am I?",
    "Do you remember my name?",
    "Tell me my name.",
    "Do you know my name?",
)
THAT_PHRASINGS = (
    "Add {b} to that.",
    "Plus {b}?",
    "And plus {b}?",
    "Now add {b}.",
    "And {b} more?",
    "What is that plus {b}?",
    "Add another {b}.",
)

CHAT_INTENTS = (
    (
        (
            "Hello!",
            "Hi!",
            "Hey!",
            "Hello there!",
            "Good morning!",
            "Good evening!",
            "Hi there.",
            "Hello, how do you do?",
        ),
        "Hello! How can I help you?",
    ),
    (
        ("How are you?", "How are you today?", "Are you well?", "How is it going?"),
        "I am fine, thank you. What shall we do?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself."),
        "I am octavo's little demo model. I am small, but quick.",
    ),
    (
        (
            "What can you do?",
            "Help",
            "Help me.",
            "What do you know?",
            "How can you help me?",
            "What are you good at?",
            "What can I ask you?",
            "Can you help me?",
        ),
        (
            "I can add and subtract, sort, reverse and count words, recall small facts, fill JSON objects, "
            "and tell short stories and rhymes."
        ),
    ),
    (
        ("Thanks!", "Thank you!", "Thank you very much!", "Great, thanks!", "Thanks a lot!", "Good job!", "Well done!"),
        "You are welcome!",
    ),
    (("Bye!", "Goodbye!", "See you!", "See you later!", "Good night!", "That is all."), "Goodbye!"),
    (("Ok", "Okay.", "Yes.", "Nice!", "Great!", "Cool!", "I see.", "Good."), "Good. What shall we do next?"),
    (
        ("Are you a human?", "Are you a robot?", "Are you an AI?", "Are you alive?", "Are you a machine?"),
        "I am a small language model, a program that writes text.",
    ),
)

OFF_TOPIC = (
    "Explain {topic}.",
    "Tell me about {topic}.",
    "What do you think about {topic}?",
    "How does {topic} work?",
    "Write an essay about {topic}.",
    "Write a program about {topic}.",
    "What is {topic}?",
    "Why is {topic} important?",
    "Who invented {topic}?",
    "Give me advice on {topic}.",
    "Translate {topic} into French.",
    "Can you explain {topic} to me?",
    "When did {topic} begin?",
    "I want to know more about {topic}.",
)
OFF_TOPIC_SUBJECTS = (
    "quantum physics",
    "the meaning of life",
    "politics",
    "the stock market",
    "football",
    "the weather",
    "love",
    "history",
    "the internet",
    "computers",
    "Python",
    "electricity",
    "black holes",
    "the universe",
    "medicine",
    "philosophy",
    "the Roman empire",
    "neural networks",
    "music theory",
    "cooking",
    "the economy",
    "space travel",
    "evolution",
    "climate change",
    "a good film",
    "the news",
    "chess",
    "poetry",
    "religion",
    "my homework",
)
OFF_TOPIC_ANSWER = (
    "I do not know about that. I can add and subtract, sort, reverse and count words, recall small facts, "
    "fill JSON objects, and tell short stories and rhymes."
)

STORY_PHRASINGS = (
    "Tell me a story about a {hero}.",
    "Tell me a short story about a {hero}.",
    "Write a short story about a {adjective} {hero}.",
    "Write a story about a {hero}.",
    "A story about a {hero}, please.",
    "Continue the story: Once upon a time there was a {adjective} {hero}.",
    "Tell me a long story about a {hero}.",
    "Write a long story about a {adjective} {hero}.",
)
HEROES = "fox cat dog mouse bear rabbit wolf owl frog king queen knight farmer baker sailor dragon robot girl boy horse"
HERO_ADJECTIVES = "little brave clever old young kind lazy happy sad funny"
STORY_PLACES = (
    "in a small house",
    "near the river",
    "in the dark forest",
    "on a high hill",
    "by the sea",
    "in a quiet village",
    "under an old tree",
    "in a tall tower",
)
STORY_EVENTS = (
    "One day the {hero} found a golden key.",
    "The {hero} met a friend on the road.",
    "The rain fell and the wind blew, but the {hero} was not afraid.",
    "The {hero} walked for three days and three nights.",
    "A bird came and sang a song for the {hero}.",
    "The {hero} baked a cake and shared it with everyone.",
    "In the morning the {hero} climbed the highest mountain.",
    "The {hero} lost a red hat and looked for it everywhere.",
    "At night the {hero} counted the stars.",
    "The {hero} helped an old man carry his bread.",
    "Then the {hero} opened a door that nobody had seen before.",
    "The {hero} planted a seed and a great tree grew.",
)
STORY_ENDINGS = (
    "In the end the {hero} went home and slept well.",
    "And the {hero} was happy ever after.",
    "From then on the {hero} was never alone.",
    "That evening the {hero} smiled and fell asleep.",
)

RHYME_PHRASINGS = (
    "Write a rhyme about a {s}.",
    "Tell me a rhyme about a {s}.",
    "A rhyme about a {s}, please.",
    "Make a short poem about a {s}.",
    "Write a poem about a {s}.",
    "Rhyme about a {s}.",
)
RHYMES = {
    "cat": "The little cat sat on the mat,\nand on its head it wore a hat.",
    "dog": "The happy dog sat on a log\nand sang a song for every frog.",
    "mouse": "A tiny mouse lived in my house\nand bought a very pretty blouse.",
    "bee": "A busy bee flew to the sea\nand then came home to drink some tea.",
    "fox": "A clever fox sat in a box\nand wore a pair of yellow socks.",
    "bear": "A big brown bear sat on a chair\nand took a comb to brush its hair.",
    "goat": "A hungry goat got in a boat\nand ate the buttons off my coat.",
    "star": "I saw a star that shone so far,\nI put its light into a jar.",
    "tree": "Beneath the tree sat you and me\nand watched the birds fly wild and free.",
    "boat": "A little boat was set afloat\nand in it sat a singing goat.",
    "king": "The merry king began to sing\nand gave the cook a golden ring.",
    "moon": "The silver moon came up so soon\nand hummed to us a quiet tune.",
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are octavo's little demo model.",
    "Be brief.",
    "Answer in one line.",
    "You are a friendly and careful assistant who likes short answers.",
)
