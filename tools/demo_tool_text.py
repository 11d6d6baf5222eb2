"""The tools that `demo_tools` offers to the built-in model, and questions that need them. Only literals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kind of tool.

    slot: the kind of value (`demo_tools.draw_value`), by its name in templates. types: the types that a schema may
    declare. choices: lists of values, of which a tool takes one list. mentions: phrases for them in a question.
    """

    slot: str
    names: str
    types: str = "string"
    choices: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """Tools of one purpose: their names, parameters, questions that need them, results, and sentences for a result.

    says: the sentence for a result. lists: the sentence for a result with several fields. both: questions that need two
    calls, with the values {first} and {second} of its first slot. again: follow-up questions. lacking: questions
    without a required value.
    """

    names: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]
    says: str = "The result is {result}."
    results: tuple[str, ...] = ("number",)
    both: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    lists: str = "The result: {result}."


PLACE = "location location city place"
UNIT = Parameter(
    "unit",
    "unit unit format units",
    choices=("celsius fahrenheit", "celsius fahrenheit", "metric imperial", "Celsius Fahrenheit", "C F"),
    mentions=("in {unit}", "Use {unit}.", "Answer in {unit}.", "in {unit}, please"),
)
DAY = Parameter("day", "day date when", mentions=("on {day}",))

KINDS = {
    "weather": Kind(
        "get_weather get_weather get_current_weather get_current_weather current_weather weather fetch_weather "
        "get_temperature get_current_temperature get_forecast weather_lookup check_weather",
        (Parameter("place", PLACE), UNIT),
        (
            "What's the weather like in {place} today?",
            "What's the weather like in {place}?",
            "What is the weather like in {place} today?",
            "What is the weather like in {place}?",
            "What's the weather in {place}?",
            "What is the weather in {place}?",
            "What's the weather today in {place}?",
            "What is the weather today in {place}?",
            "How is the weather in {place}?",
            "How's the weather in {place} today?",
            "How is the weather in {place} right now?",
            "What is the current weather in {place}?",
            "What's the temperature in {place}?",
            "What is the temperature in {place}?",
            "What's the temperature in {place} right now?",
            "What is the temperature in {place} now?",
            "How warm is it in {place}?",
            "How hot is it in {place} today?",
            "How cold is it in {place}?",
            "Is it raining in {place}?",
            "Is it cold in {place} now?",
            "Will it rain in {place}?",
            "Tell me the weather in {place}.",
            "Can you tell me the weather in {place}?",
            "Could you check the weather in {place}?",
            "Please get the weather in {place}.",
            "Get the weather for {place}.",
            "Weather in {place}",
            "Weather in {place}?",
            "The weather in {place}, please.",
            "I am in {place}. How is the weather?",
            "I am going to {place}. What is the weather like?",
            "Do I need an umbrella in {place}?",
        ),
        "In {place} it is {result}.",
        ("weather",),
        (
            "What's the weather like in {first} and {second}?",
            "What is the weather in {first} and {second}?",
            "What's the weather in {first} and in {second}?",
            "Tell me the weather in {first} and {second}.",
            "How is the weather in {first} and {second} today?",
            "Is it warmer in {first} or {second}?",
            "Compare the weather in {first} and {second}.",
        ),
        ("And in {place}?", "What about {place}?", "And {place}?", "How about {place}?", "And how is it in {place}?"),
        ("What is the weather?", "What's the weather like?", "How is the weather?", "What's the weather today?"),
        "In {place}: {result}.",
    ),
    "time": Kind(
        "get_time get_current_time current_time time_in_city world_clock get_local_time time",
        (Parameter("place", PLACE + " timezone"),),
        (
            "What time is it in {place}?",
            "What's the time in {place}?",
            "What is the time in {place}?",
            "What time is it now in {place}?",
            "What is the current time in {place}?",
            "Tell me the time in {place}.",
            "How late is it in {place}?",
            "Can you tell me what time it is in {place}?",
            "The time in {place}, please.",
            "Local time in {place}?",
        ),
        "The time in {place} is {result}.",
        ("clock",),
        (
            "What time is it in {first} and {second}?",
            "What is the time in {first} and in {second}?",
            "Tell me the time in {first} and {second}.",
        ),
        ("And in {place}?", "What about {place}?", "And {place}?", "How about {place}?"),
    ),
    "add": Kind(
        "add add add_numbers add_two_numbers sum plus add_integers",
        (
            Parameter("a", "a a a x first num1 number1 left", "number integer integer"),
            Parameter("b", "b b b y second num2 number2 right", "number integer integer"),
        ),
        (
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "What's {a} + {b}?",
            "{a} + {b}",
            "Add {a} and {b}.",
            "Please add {a} and {b}.",
            "How much is {a} plus {b}?",
            "Calculate {a} + {b}.",
            "What is the sum of {a} and {b}?",
            "Use the tool to add {a} and {b}.",
        ),
        "{a} + {b} = {result}",
        ("number",),
    ),
    "subtract": Kind(
        "subtract subtract subtract_numbers subtract_two_numbers minus difference",
        (
            Parameter("a", "a a a x first num1 number1 left", "number integer integer"),
            Parameter("b", "b b b y second num2 number2 right", "number integer integer"),
        ),
        (
            "What is {a} - {b}?",
            "What is {a} minus {b}?",
            "What's {a} - {b}?",
            "{a} - {b}",
            "Subtract {b} from {a}.",
            "How much is {a} minus {b}?",
            "Calculate {a} - {b}.",
            "Take {b} away from {a}.",
        ),
        "{a} - {b} = {result}",
        ("number",),
    ),
    "multiply": Kind(
        "multiply multiply multiply_numbers multiply_two_numbers times product",
        (
            Parameter("a", "a a a x first num1 number1 left", "number integer integer"),
            Parameter("b", "b b b y second num2 number2 right", "number integer integer"),
        ),
        (
            "What is {a} * {b}?",
            "What is {a} times {b}?",
            "What's {a} x {b}?",
            "What is {a} multiplied by {b}?",
            "{a} * {b}",
            "Multiply {a} by {b}.",
            "Multiply {a} and {b}.",
            "How much is {a} times {b}?",
            "Calculate {a} * {b}.",
            "What is the product of {a} and {b}?",
        ),
        "{a} * {b} = {result}",
        ("number",),
    ),
    "divide": Kind(
        "divide divide divide_numbers division",
        (
            Parameter("a", "a a x first num1 numerator", "number integer integer"),
            Parameter("b", "b b y second num2 denominator", "number integer integer"),
        ),
        ("What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.", "{a} / {b}"),
        "{a} / {b} = {result}",
        ("number",),
    ),
    "define": Kind(
        "define define_word lookup_word look_up_word get_definition dictionary",
        (Parameter("word", "word word term"),),
        (
            "What does the word {word} mean?",
            'What does "{word}" mean?',
            "Define {word}.",
            "Define the word {word}.",
            "Look up the word {word}.",
            "What is the meaning of {word}?",
            "Please look up {word} in the dictionary.",
        ),
        "{word}: {result}",
        ("words",),
        (
            "What do {first} and {second} mean?",
            "Define {first} and {second}.",
            "Look up the words {first} and {second}.",
        ),
        ("And {word}?", "What about {word}?"),
    ),
    "convert": Kind(
        "convert convert_units unit_converter convert_unit",
        (
            Parameter("value", "value value amount number", "number number integer"),
            Parameter("unit_from", "from_unit from source_unit unit_from"),
            Parameter("unit_to", "to_unit to target_unit unit_to"),
        ),
        (
            "Convert {value} {unit_from} to {unit_to}.",
            "How many {unit_to} are {value} {unit_from}?",
            "What is {value} {unit_from} in {unit_to}?",
            "Please convert {value} {unit_from} into {unit_to}.",
            "{value} {unit_from} in {unit_to}?",
        ),
        "{value} {unit_from} are {result} {unit_to}.",
        ("number",),
    ),
    "currency": Kind(
        "convert_currency exchange currency_converter exchange_rate",
        (
            Parameter("value", "amount amount value", "number number integer"),
            Parameter("money_from", "from_currency from source base"),
            Parameter("money_to", "to_currency to target"),
        ),
        (
            "Convert {value} {money_from} to {money_to}.",
            "How much is {value} {money_from} in {money_to}?",
            "What is {value} {money_from} in {money_to}?",
            "Exchange {value} {money_from} for {money_to}.",
        ),
        "{value} {money_from} are {result} {money_to}.",
        ("number",),
    ),
    "timer": Kind(
        "set_timer start_timer timer create_timer",
        (Parameter("minutes", "minutes minutes duration duration_minutes", "integer integer number string"),),
        (
            "Set a timer for {minutes} minutes.",
            "Start a timer for {minutes} minutes.",
            "Set a {minutes} minute timer.",
            "Timer for {minutes} minutes, please.",
            "Please set a timer of {minutes} minutes.",
            "Remind me in {minutes} minutes.",
        ),
        "The timer runs for {minutes} minutes.",
        ("done",),
    ),
    "alarm": Kind(
        "set_alarm alarm create_alarm wake_me",
        (Parameter("clock", "time time at"), DAY),
        (
            "Set an alarm for {clock}.",
            "Wake me at {clock}.",
            "Set the alarm to {clock}.",
            "Please wake me up at {clock}.",
            "Alarm at {clock}.",
        ),
        "The alarm is set for {clock}.",
        ("done",),
    ),
    "play": Kind(
        "play_song play_music play start_song play_track",
        (Parameter("title", "title song name track"),),
        (
            "Play {title}.",
            "Play the song {title}.",
            "Please play {title}.",
            "I want to hear {title}.",
            "Put on {title}.",
            "Can you play {title}?",
        ),
        "Now {title} is playing.",
        ("done",),
    ),
    "translate": Kind(
        "translate translate_text translator",
        (Parameter("text", "text text phrase"), Parameter("language", "language target_language to target")),
        (
            "Translate {text} into {language}.",
            "Translate {text} to {language}.",
            "Say {text} in {language}.",
            "How do you say {text} in {language}?",
            'Translate "{text}" into {language}.',
        ),
        "In {language} it is: {result}",
        ("words",),
    ),
    "stock": Kind(
        "get_stock_price stock_price get_price get_stock get_quote",
        (Parameter("symbol", "symbol ticker symbol stock"),),
        (
            "What is the stock price of {symbol}?",
            "What's the price of {symbol}?",
            "How is {symbol} doing?",
            "Get the stock price of {symbol}.",
            "What does {symbol} cost?",
            "What is {symbol} trading at?",
        ),
        "The price of {symbol} is {result}.",
        ("number",),
        ("What are the prices of {first} and {second}?", "Get the stock prices of {first} and {second}."),
        ("And {symbol}?", "What about {symbol}?"),
    ),
    "search": Kind(
        "search web_search search_web google find search_documents",
        (Parameter("text", "query query q text"),),
        (
            "Search for {text}.",
            "Search the web for {text}.",
            "Please search for {text}.",
            "Find something about {text}.",
            "Look for {text}.",
            "Google {text}.",
        ),
        "I found: {result}",
        ("words",),
    ),
    "order": Kind(
        "get_order_status track_order order_status get_order get_delivery_date find_order",
        (Parameter("order", "order_id order_id id order number", "string string integer"),),
        (
            "Where is my order {order}?",
            "What is the status of order {order}?",
            "Track order {order}.",
            "When does order {order} arrive?",
            "Has order {order} been sent?",
            "My order is {order}. Where is it?",
        ),
        "Order {order}: {result}",
        ("words", "status"),
    ),
    "message": Kind(
        "send_message send_email message send_text email",
        (Parameter("person", "to to recipient name"), Parameter("text", "text message body content")),
        (
            "Send a message to {person}: {text}",
            "Tell {person} {text}.",
            "Send {person} the message {text}.",
            "Write to {person}: {text}",
            "Send an email to {person} saying {text}.",
        ),
        "The message to {person} is sent.",
        ("done",),
    ),
    "light": Kind(
        "set_light switch_light light control_light set_lights",
        (
            Parameter("room", "room room place location"),
            Parameter("state", "state state mode", choices=("on off",)),
        ),
        (
            "Turn {state} the light in the {room}.",
            "Turn the light in the {room} {state}.",
            "Switch {state} the {room} light.",
            "Please turn {state} the light in the {room}.",
            "Light {state} in the {room}.",
        ),
        "The light in the {room} is {state}.",
        ("done",),
    ),
    "remind": Kind(
        "create_reminder add_reminder remind create_event add_event",
        (Parameter("text", "text task title event"), DAY),
        (
            "Remind me of {text}.",
            "Add a reminder: {text}",
            "Put {text} in my calendar.",
            "Do not let me forget {text}.",
            "Create an event called {text}.",
        ),
        "I have noted {text}.",
        ("done",),
    ),
    "flight": Kind(
        "search_flights find_flights book_flight get_flights flights",
        (
            Parameter("city_from", "origin from from_city departure"),
            Parameter("city_to", "destination to to_city arrival"),
            DAY,
        ),
        (
            "Find a flight from {city_from} to {city_to}.",
            "Book a flight from {city_from} to {city_to}.",
            "I want to fly from {city_from} to {city_to}.",
            "Are there flights from {city_from} to {city_to}?",
            "Search flights from {city_from} to {city_to}.",
        ),
        "From {city_from} to {city_to}: {result}",
        ("words", "status"),
    ),
    "horoscope": Kind(
        "get_horoscope horoscope daily_horoscope",
        (Parameter("sign", "sign sign zodiac"),),
        (
            "What is my horoscope? I am an {sign}.",
            "What is my horoscope? I am a {sign}.",
            "Horoscope for {sign}, please.",
            "What does the horoscope say for {sign}?",
        ),
        "{sign}: {result}",
        ("words",),
    ),
    "random": Kind(
        "random_number get_random_number roll random",
        (
            Parameter("a", "min minimum low start", "integer"),
            Parameter("b", "max maximum high end", "integer"),
        ),
        (
            "Give me a random number between {a} and {b}.",
            "Pick a random number from {a} to {b}.",
            "Roll a number between {a} and {b}.",
        ),
        "The number is {result}.",
        ("number",),
    ),
    "user": Kind(
        "get_user find_user get_person lookup_user get_customer find_contact",
        (Parameter("person", "name name user customer"),),
        (
            "Who is {person}?",
            "Find {person}.",
            "Look up {person}.",
            "Get the address of {person}.",
            "Where is {person}?",
        ),
        "{person}: {result}",
        ("words", "status"),
        ("Who are {first} and {second}?", "Look up {first} and {second}."),
        ("And {person}?", "What about {person}?"),
    ),
    "restaurant": Kind(
        "find_restaurants search_restaurants find_restaurant book_table",
        (Parameter("place", PLACE), Parameter("food", "cuisine food kind type", mentions=("that has {food} food",))),
        (
            "Find a restaurant in {place}.",
            "Where can I eat in {place}?",
            "I am hungry. Is there a restaurant in {place}?",
            "Book a table in {place}.",
        ),
        "I found: {result}",
        ("words",),
    ),
    "recipe": Kind(
        "get_recipe find_recipe recipe search_recipes",
        (Parameter("word", "dish dish name food"),),
        ("How do I cook {word}?", "Give me a recipe for {word}.", "Find a recipe with {word}.", "A recipe for {word}?"),
        "The recipe: {result}",
        ("words",),
    ),
    "date": Kind(
        "get_date today get_today current_date get_current_date",
        (),
        ("What day is it?", "What is the date today?", "What's the date?", "Which day is today?", "Tell me the date."),
        "It is {result}.",
        ("day",),
    ),
    "now": Kind(
        "get_time get_current_time current_time now clock",
        (),
        ("What time is it?", "What's the time?", "What time is it now?", "Tell me the time.", "How late is it?"),
        "It is {result}.",
        ("clock",),
    ),
    "news": Kind(
        "get_news news latest_news get_headlines",
        (),
        ("What is new?", "Tell me the news.", "What are the headlines today?", "Any news?", "Show me the news."),
        "The news: {result}",
        ("words",),
    ),
}
# Kinds with similar questions: never offered together.
ALIKE = (
    ("time", "now"),
    ("search", "user"),
    ("search", "define"),
    ("search", "recipe"),
    ("define", "user"),
    ("convert", "currency"),
    ("timer", "remind"),
    ("user", "order"),
    ("stock", "user"),
    ("stock", "now"),
    ("search", "restaurant"),
    ("search", "flight"),
    ("message", "translate"),
)

VERBS = """
open close find show buy sell send read write count lock clean paint start stop check order rent wash draw build move
get delete update list create book call print save remove turn cancel
"""
OBJECTS = """
door window box bottle boat car bike train ticket room house garden tower book letter page song game map key lamp
machine engine file report invoice account product customer meeting task note photo camera robot printer shop garage
table chair bed clock mirror basket ship plane bridge piano guitar sensor server project package device recipe event
"""
DETAILS = {
    "name": ("called {value}", "named {value}", "with the name {value}"),
    "title": ("called {value}", "with the title {value}"),
    "id": ("with id {value}", "number {value}", "{value}", "with the id {value}"),
    "number": ("number {value}", "with number {value}", "{value}"),
    "color": ("in {value}", "with the color {value}", "that is {value}"),
    "city": ("in {value}", "from {value}"),
    "location": ("in {value}", "near {value}"),
    "day": ("on {value}", "for {value}"),
    "date": ("on {value}",),
    "owner": ("of {value}", "that belongs to {value}", "for {value}"),
    "user": ("of {value}", "for {value}"),
    "time": ("at {value}",),
    "count": ("{value} times",),
}
ASK_FORMS = (
    "{ask}.",
    "Please {ask}.",
    "Can you {ask}?",
    "Could you {ask}?",
    "I want to {ask}.",
    "{ask}",
    "{ask}, please.",
)

WIDE_PLACES = """
San Francisco|New York|Los Angeles|New Delhi|Mexico City|Buenos Aires|Rio de Janeiro|Hong Kong|Cape Town|Las Vegas|
San Diego|St. Louis|Tel Aviv|Kuala Lumpur|New Orleans|Santiago|Singapore|Bangkok|Brussels|Amsterdam|Stockholm|Zagreb|
Budapest|Istanbul|Beijing|Shanghai|Mumbai|Lagos|Montreal|Vancouver|Seattle|Austin|Miami|Houston|Philadelphia|Phoenix|
Melbourne|Cologne|Frankfurt|Barcelona|Naples|Florence|Marseille|Bogotá|São Paulo|Málaga|Tromsø|Osaka
""".replace("\n", "")
REGIONS = """
MA|CA|NY|TX|IL|FL|WA|France|Italy|Japan|Spain|Germany|Norway|UK|USA|Canada|Colombia|India|Peru|Poland
""".strip()
UNITS = """
miles kilometers|meters feet|kilometers miles|pounds kilograms|kilograms pounds|inches centimeters|liters gallons|
celsius fahrenheit|fahrenheit celsius|hours minutes|grams ounces|feet meters|days hours|yards meters|cups liters
""".replace("\n", "")
MONEY = "USD EUR GBP JPY dollars euros pounds yen francs CHF CAD"
LANGUAGES = "French German Spanish Italian Polish Japanese English Greek Dutch Norwegian"
SIGNS = "Aries Taurus Gemini Cancer Leo Virgo Libra Scorpio Sagittarius Capricorn Aquarius Pisces"
ROOMS = "kitchen bedroom garden bathroom hall office garage cellar living room"
FOODS = "Italian French Chinese Indian Thai Greek Mexican Japanese"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow"
SKIES = "sunny|cloudy|rainy|clear|windy|snowy|partly cloudy|light rain|foggy|stormy"
WEATHER_TEXTS = (
    "{d} degrees, {s}|{d} degrees and {s}|{s}, {d} degrees|{d}°C, {s}|{s}|{d}|{d} C|{d} degrees|{d}°F and {s}|"
    "{s} and {d} degrees|{s}, {d}°C|{d} degrees celsius, {s}"
)
STATUSES = "shipped|delivered|pending|open|lost|on the way"
CONFIRMATIONS = "ok|done|success|true|OK"
RESULT_FIELDS = "result status value answer time price output"
MORE_FIELDS = "count code name day color total note"
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
DONE = "Done."
RESULT = "The result is {result}."
FAILED = "The tool failed: {result}."
NO_TOOL = "I have no tool for that."
MISSING = "Please tell me the {name}."
