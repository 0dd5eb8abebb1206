"""Templates of the procedural prompts. See ``procedural.py`` for slots and their forms.

A template is a text: every line a part of the prompt, alternatives separated by ``|`` (an empty one leaves the part
out), ``---`` before the next user turn, ``\\n`` for a line break inside a part.
"""

# ruff: noqa: E501 - one part, one line

from __future__ import annotations

Part = list[str]
Template = tuple[str, tuple[list[Part], ...]]

SENTENCES = [
    "{name} walked to the {place} on {day} to buy {some} {thing.s}, but it was closed because of {reason}.",
    "The {event} in {city} was moved to {month} because of {reason}.",
    "Last {month}, {name} and {name2} opened a small {place} that sells {thing.s} and {thing2.s}.",
    "My {object} {problem}, so I took the {vehicle} to the {place} and asked a {job} for help.",
    "Every {day} morning the {job} feeds {few} {animal.s} before the {vehicle} arrives.",
    "{name} was {mood} when the {job} found the missing {thing} behind a {container}.",
    "About {many} people came to the {event}, although the weather in {city} was cold.",
    "The {job} told {name} that the {object} would be ready by {day}.",
    "In {year}, the {place} in {city} had {lots} visitors and only {few} members of staff.",
    "{name} has been trying to {aim} since {month}, and it takes about {minutes} minutes a day.",
    "We packed {few} {container.s} of {thing.s}, {some} {thing2.s} and one {object} into the {vehicle}.",
    "The children were {mood} because the {animal} had eaten all of the {food}.",
    "For lunch, {name} cooked {food} with {food2} and invited {few} friends from the {place}.",
    "A {quality} {object} costs about {many} dollars at the {place} in {city}.",
    "Before the {event}, the {job} and the {job2} cleaned the whole {place} together.",
    "The {vehicle} from {city} was {minutes} minutes late, and {name} missed the {event}.",
    "{name} wrote a letter to the {place} because the new {object} {problem}.",
    "Nobody at the {place} knew why the {animal} was sitting on the {object}.",
    "The town of {city} will build a new {place} next to the old {place2} in {month}.",
    "{name} gave {few} {thing.s} to {name2} and kept the rest in {container.a}.",
    "Since the price of {food} rose by {percent} percent, the {job} buys {food2} instead.",
    "On {day}, a {job} from {city} showed us how to repair {object.a} in {minutes} minutes.",
    "{name} is a {job} who loves {food} and has {few} {animal.s} at home.",
    "The {event} starts at {few} o'clock, but the doors of the {place} open {minutes} minutes earlier.",
]


def _parse(texts: dict[str, str]) -> list[Template]:
    """Turn the texts below into parts and alternatives."""
    return [(name, tuple(_turn(turn) for turn in text.split("---"))) for name, text in texts.items()]


def _turn(text: str) -> list[Part]:
    lines = [_SHARED.get(line.strip(), line) for line in text.split("\n") if line.strip()]
    return [[choice.strip(" ").replace("\\n", "\n") for choice in line.split("|")] for line in lines]


_SHOW = r""" | Show your work. | Explain each step. | Solve this step by step. | Write down the calculation. | Give the answer at the end. | Think step by step."""
_CODE_END = r"""Add a docstring. | Show an example call. | Explain it briefly. | Include {pair} test cases. | Keep it short. | Handle empty input. | Use clear names."""
_TEXT = r"""\n\n{sentence} {sentence2} | \n\n{sentence} {sentence2} {sentence3} | \nText: {sentence} {sentence2}"""
_FOLLOW = r"""Thank you! Can you make it shorter? | Thanks. Which point matters most? | And what if I only have {minutes} minutes? | Great. Can you give an example with {thing.s}? | Please write that as a list. | How would {job.a} see it?"""
_SHARED = {"@show": _SHOW, "@code": _CODE_END, "@text": _TEXT, "@follow": _FOLLOW}

MATH = {
    "shopping": r"""
        {name} goes to the {place} with {many} dollars. | At the {place}, {name} has {many} dollars to spend. | {name} saved {many} dollars and visits the {place} in {city}.
        {name} buys {few} {thing.s} for {price} dollars each | There, {few} {thing.s} cost {price} dollars apiece, and {name} takes them all | A {thing} costs {price} dollars and {name} needs {few} of them
        and {pair} {thing2.s} for {price2} dollars each. | and also pays {price2} dollars for {thing2.a}. | and then adds {pair} {thing2.s} at {price2} dollars each.
        How much money is left? | How many dollars does {name} have in the end? | How much was spent in total? | What is the total price?
        @show
    """,
    "sharing": r"""
        {name} has {some} {thing.s}. | There are {some} {thing.s} in {name}'s {container}. | A {job} brings {some} {thing.s} to the {event}.
        {name2} brings {few} more. | On {day}, {name2} adds {few} {thing.s}. | {few2} of them are broken. | {name} gives {few} of them to {name2}.
        The rest is shared equally among {pair} {job.s}. | They are divided equally between {pair} {container.s}. | {pair} friends from {city} split them evenly.
        How many {thing.s} does each get? | How many does each part hold, and are any left over? | How many {thing.s} are in each part?
        @show
    """,
    "travel": r"""
        A {vehicle} leaves {city} for {city2} at {some} kilometres per hour. | {name} drives a {vehicle} from {city} to {city2} at an average of {some} kilometres per hour. | The {vehicle} between {city} and {city2} travels {some} kilometres every hour.
        It drives for {few} hours and then stops for {minutes} minutes. | The journey takes {few} hours and {minutes} minutes. | After {few} hours it has a break of {minutes} minutes.
        How far is it? | What distance has been covered? | How long does the whole journey take for {many} kilometres? | How many kilometres are left of {lots}?
        @show
    """,
    "savings": r"""
        {name} wants to buy {object.a} that costs {lots} dollars. | {object.a} at the {place} in {city} costs {lots} dollars, and {name} would like to have it. | To {aim}, {name} needs {lots} dollars.
        {name} already has {many} dollars and saves {price} dollars every week. | There are {many} dollars in the savings account, and {name} earns {price} dollars a day as a {job}. | Since {month}, {name} has put aside {some} dollars each month.
        How long will it take? | How many weeks must {name} save? | How much is still missing after {few} weeks?
        @show
    """,
    "baking": r"""
        A recipe for {few} people needs {many} grams of {food} and {many2} grams of {food2}. | To make {some} {food} pancakes, {name} uses {many} grams of flour and {few} eggs. | The {job} mixes {many} grams of {food} with {many2} grams of {food2} for {few} portions.
        {name} cooks for {some2} guests at the {event}. | On {day}, {some2} visitors come to the {event}. | The {place} orders {some2} portions for {month}.
        How many grams of each are needed? | How much {food} is needed? | By what factor must the recipe grow?
        @show
    """,
    "discount": r"""
        The price of {object.a} is {lots} dollars. | A shop in {city} sells {object.a} for {lots} dollars. | {name} finds {object.a} that costs {lots} dollars at the {place}.
        In {month}, there is a discount of {percent} percent. | With a coupon, {name} pays {percent} percent less. | On {day}, the price rises by {percent} percent. | A {job} gets {percent} percent off.
        Delivery costs {price} dollars. | {name} also buys {few} {thing.s} for {price} dollars each. | 
        What is the new price? | How much does {name} pay in total? | How much money is saved?
        @show
    """,
    "farm": r"""
        {name}'s farm near {city} has {some} {animal.s} and {few} {animal2.s}. | A {job} keeps {some} {animal.s} and {few} {animal2.s} behind the {place}. | There are {some} {animal.s} and {few} {animal2.s} at the farm of {name}.
        Each {animal} eats {few2} kilograms of {food} a week | Every {animal} needs {few2} cups of {food} per day | Each {animal} costs {price} dollars a month
        and each {animal2} needs twice as much. | and each {animal2} half of that. | and each {animal2} {pair} times as much. | while {animal2.s} are fed {price2} kilograms in all.
        How much is needed in {pair} weeks? | What is the total for all of them? | How much more do the {animal.s} need than the {animal2.s}?
        @show
    """,
    "reading": r"""
        {name} reads a book of {lots} pages. | A book about {topic} has {lots} pages, and {name} wants to finish it. | For the {event}, {name} must read {lots} pages about {topic}.
        On {day} {name} reads {some} pages and the day after {some2} pages. | Every day {name} reads {some} pages, except on {day}, when it is {few}. | {name} reads {few} pages in {minutes} minutes.
        How many pages are left after {pair} days? | After how many days is the book finished? | How long does the whole book take?
        @show
    """,
    "rectangle": r"""
        A garden behind the {place} is {some} metres long and {few} metres wide. | {name} wants to paint a wall of {some} metres by {few} metres at the {place}. | The floor of the {place} in {city} measures {some} by {few} metres.
        One metre of fence costs {price} dollars. | A {job} needs {minutes} minutes for one square metre. | Each square metre needs {few2} {thing.s}. | One can of paint covers {few2} square metres and costs {price} dollars.
        What is the area, and what does the work need in total? | What are the perimeter and the area? | How much does {name2} have to pay or to buy?
        @show
    """,
    "ages": r"""
        {name} is {some} years old and {name2} is {few} years younger. | {name} is {pair} times as old as {name2}, who is {few} years old. | The {job} {name} was born in {year}, {few} years before {name2}.
        In {few2} years, {name2} wants to {aim}. | {name3} is {few2} years older than {name}. | Together with {name3} they are {many} years old.
        How old is each of them? | How old will {name2} be in {pair2} years? | What is the sum of their ages? | What is the difference between the oldest and the youngest?
        @show
    """,
}

EXPLAIN = {
    "calculation": r"""
        Explain step by step how to calculate | Show in detail how one computes | Explain to {audience} how to work out
        {many} + {many2} | {lots} - {many} | {some} x {few} | {many} divided by {few} | {percent} percent of {lots} | the average of {some}, {many} and {few}
        and check the result. | and give the answer at the end. | with an example about {thing.s}. | and then do the same with {some2} instead of the first number.
    """,
    "units": r"""
        Explain how to convert | How do you convert | Show how one converts
        {few} hours and {minutes} minutes into minutes | {some} kilometres into metres | {many} centimetres into metres | {few} kilograms into grams | {some} weeks into days
        and then do the same for {pair} times as much. | for {job.a} at the {place}. | and write down every step. | and explain the rule to {audience}.
    """,
    "rule": r"""
        Explain the order of these numbers: | Describe the pattern of these numbers: | What is the rule behind this sequence:
        {few}, {some}, {many}, {lots}. | {pair}, {few}, {some}, {some2}, {many}. | {price}, {price2}, {some}, {many}.
        Say for each number whether it is even or odd. | Compare each number with the one before it. | Then write the numbers in words. | Which one is the largest, and which the smallest?
    """,
    "how": r"""
        Explain how {topic} works | Please explain {topic} | Describe in simple words how {topic} works | Can you explain the basics of {topic}
        to {audience} | as you would to {audience} | for {audience} in {city} | to {job.a}
        in {few} sentences. | in about {many} words. | with an example about {food}. | with an example from {field}. | using a comparison with {object.a}.
    """,
    "why": r"""
        Why is {topic} important | Why does {topic} matter | What makes {topic} worth knowing
        for {field}? | for {job.a}? | for {audience}? | for people in {city}? | when you want to {aim}?
        Give {few} reasons. | Name {pair} advantages and {pair2} risks. | Answer in one paragraph of {many} words. | Begin with a short definition. | End with a tip about {field}.
    """,
    "history": r"""
        Tell me about the history of {topic} | Give a short history of {topic} | How did people learn about {topic}
        in {few} steps | in {many} words | from the beginning until {year} | for an article about {city}
        and say why it matters for {field}. | and name one important person. | so that {audience} understands it. | and mention {topic2}.
    """,
    "misconception": r"""
        Name {pair} common mistakes about {topic} | What do people often get wrong about {topic} | Which myths exist about {topic}
        and correct them | and explain the facts | and say where they come from
        for {audience}. | in {many} words. | with an example from {field}. | as a {job} would.
    """,
    "steps": r"""
        Describe the steps of {topic} | Walk me through {topic} | Break {topic} down into simple stages
        for a talk at the {event}. | for a poster at the {place}. | so that {job.a} can teach it. | for {audience}. | for a lesson on {day}.
        Number the steps. | Use at most {many} words. | Keep each step to one sentence. | Add a warning at the end. | Start with what is needed.
    """,
    "question_and_answer": r"""
        Write {pair} questions and answers about {topic} | Make a small quiz with {pair} questions on {topic}
        for {audience} | for a {event} in {city} | for a course on {field}
        with short answers. | and explain every answer. | and begin with an easy one.
    """,
}

REWRITE = {
    "tone": r"""
        Rewrite the following text in a {mood} tone. | Make this text sound more formal. | Make this text friendlier. | Rewrite the text as {job.a} would say it.
        @text
    """,
    "shorten": r"""
        Shorten this text to one sentence. | Summarise the text below in {few} words or a few more. | Write a summary for {audience}. | What is the main point of this text?
        @text
    """,
    "tense": r"""
        Rewrite the text in the present tense. | Put this text into the future tense. | Change the text to the past tense. | Rewrite it in the first person.
        @text
    """,
    "correct": r"""
        Correct the punctuation and the capital letters. | Fix the mistakes in this message. | Please proofread this text.
        \n\n{sentence.l} {sentence2.l} | \n\n{sentence.l} {sentence2.l} {sentence3.l}
    """,
    "bullets": r"""
        Turn this text into bullet points. | List the facts of this text, one per line. | Extract all names and numbers as a list.
        @text
    """,
    "continue": r"""
        Continue this story with {pair} more sentences. | Write the next paragraph. | Finish the story with a {mood} ending.
        @text
    """,
    "replace": r"""
        Replace every first name in this text with {name} and change nothing else. | Rewrite the text so that it takes place in {city} in {month}. | Copy the text, but write every number as a word.
        @text
    """,
    "email": r"""
        Turn these notes into a short email to {job.a}. | Write a polite email to {name} with this content. | Make an announcement for the {event} out of this.
        @text
    """,
    "title": r"""
        {sentence} {sentence2} | {sentence} {sentence2} {sentence3} | {sentence2} {sentence}
        \n\nWrite {pair} titles for this text. | \n\nGive this text a title and repeat it below. | \n\nRepeat this text and add one fitting sentence. | \n\nRephrase each sentence.
    """,
}

LIST = {
    "numbered": r"""
        Write these as a numbered list: | Turn this into a numbered list with one item per line: | Make a bullet list of the following:
        {thing.s}, {food}, {animal.s}, {object}, {thing2.s}, {city}, {job} | {name}, {name2}, {name3}, {name4}, {name5} | {food}, {food2}, {food3}, {thing.s}, {thing2.s}, {object} | {city}, {city2}, {city3}, {animal}, {vehicle}, {place}
        . | . Add the word {mood} to each. | . Then write the list in reverse order. | . Begin each line with the number {few}.
    """,
    "table": r"""
        Write the multiplication table of {few} | Write the first {some} multiples of {few} | Count from {few} to {some} in steps of {pair} | List the numbers from {some} down to {few}
        , one per line. | and put the word {thing} after each number. | and say which of them are above {few2}. | , as a list of equations.
    """,
    "shopping_list": r"""
        Make a shopping list from this: | Write this order as a list: | List what {name} has to buy:
        {few} {thing.s}, {pair} {container.s} of {food} and {some} {thing2.s} for the {event}, and {object.a} for {name2}. | {few} kilograms of {food}, {few2} of {food2}, {pair} {object.s} and {some} {thing.s}. | {pair} {container.s} of {food}, {few} {thing.s} at {price} dollars each and {object.a}.
        Put the number first. | Number the items. | Add a line with the name of the shop, {place} {city}. |
    """,
    "things": r"""
        List {few} {quality} {category} | Name {few} {category} that are {quality} | Give me {few} {quality} {category}
        for {audience} | for {job.a} in {city} | for a trip in {month} | for the {event} | for {field}
        with one sentence on each. | and say why. | as a numbered list. | and sort them by price. | and mark your favourite.
    """,
    "meal": r"""
        Suggest {few} meals with {food} and {food2} | What can I cook from {food}, {food2} and {food3} | Write a menu of {few} dishes with {food}
        for {few2} guests | for {job.a} with little time | for a week in {month} | for the {event}
        under {price} dollars each. | that take at most {minutes} minutes. | and list the ingredients. | and name a side dish for each.
    """,
    "plan": r"""
        Make a plan of {few} steps to {aim} | List {few} things to do if I want to {aim} | Give me a weekly schedule to {aim}
        before {month} | with {minutes} minutes a day | while working as a {job} | with a budget of {many} dollars
        in {city}. | without {object.a}. | together with {name}. | starting on {day}.
    """,
    "pros": r"""
        List {pair} advantages and {pair2} disadvantages of {topic} | Name {few} facts about {topic} | Write {few} keywords about {topic} with a short definition
        for {audience}. | for {field}. | for a poster at the {place}. | for the {event} in {city}.
    """,
    "names": r"""
        Suggest {few} names for a {place} in {city} | Invent {few} names for {quality} {category} | Find {few} titles for a book about {topic}
        that sound {mood} | that mention {animal.a} | that start with the letter of {name} | for {audience}
        and explain each. | in a numbered list. | with a slogan for each.
    """,
    "compare_table": r"""
        Make a table of {few} {category} | Compare {few} {quality} {category} in a table
        with the columns name, price and use | with a column for {audience} | with advantages and disadvantages
        for {field}. | for the {place} in {city}. | for {month}.
    """,
    "questions": r"""
        Write {few} questions to ask {job.a} | List {few} interview questions for {job.a} | Which {few} questions should I ask {job.a}
        about {topic} | at the {event} | when my {object} {problem} | before I {aim}
        in {city}. | on {day}. | as a beginner. | and say why each is useful.
    """,
    "order": r"""
        Sort these by size: {thing}, {animal}, {object}, {thing2}. | Put these into groups: {food}, {animal}, {thing}, {food2}, {animal2}. | Which does not fit: {food}, {food2}, {object}, {food3}?
        Explain your choice. | Then add {pair} more of each kind. | Answer as a list. | Write one line about each.
    """,
}

CODE = {
    "filter": r"""
        Write a {language} function that takes a list of {record.s} and returns those whose {attribute} is
        above {many}. | below {some}. | between {few} and {many}. | equal to the largest {attribute}.
        Sort them by {attribute2}. | Count them too. | Ignore a {record} without {attribute2.a}. | 
        @code
    """,
    "aggregate": r"""
        Write a {language} program that computes the average {attribute} | In {language}, find the total {attribute} | Write {language} code for the highest {attribute}
        of all {record.s} per {attribute2}. | of the first {few} {record.s}. | of {record.s} from a file. | of {record.s} with the {attribute2} {some}.
        @code
    """,
    "class": r"""
        Write a Python class `{record.k}` | Create a small {language} type for a {record}
        with the fields {attribute}, {attribute2} and {attribute3} | that stores its {attribute} and {attribute2}
        and a method that changes the {attribute} by {percent} percent. | and a method that compares two by {attribute2}. | and a method that prints it in one line.
        @code
    """,
    "strings": r"""
        Write a {language} function that | Write a short {language} script that
        counts the words | reverses every word | removes the vowels | finds the longest word | replaces each digit | capitalises every second letter | checks for palindromes
        in the {attribute} of a {record}. | in a text with {many} lines. | in a list of {record} names. | in a message about {thing.s}.
        @code
    """,
    "loop": r"""
        Using {language}, print | Write a {language} loop that prints
        the multiples of {few} up to {many} | the first {some} square numbers | every number from {few} to {many} that ends in {few2} | a countdown from {some} to {few} | the Fibonacci numbers below {lots}
        with their sum. | in one line. | in reverse order. | next to the word {thing}.
        @code
    """,
    "convert": r"""
        Write a {language} function that converts | How do I convert in {language}
        a {container_type} of {record.s} into a {container_type2} | a list of {attribute} values from minutes to hours | {few} prices from dollars to euros with a rate of 0.{some} | a {record} to JSON text
        and skips duplicates. | and keeps the order. | and rounds to {pair} digits. | and reports errors.
        @code
    """,
    "explain_code": r"""
        Explain this code: | What does this code do? | Find the mistake in this code:
        \n```python\ndef {record.u}_{attribute.u}({record.u}s):\n    total = {few}\n    for item in {record.u}s:\n        total += item['{attribute.u}'] * {price}\n    return total / len({record.u}s)\n``` | \n```python\n{thing.u}_count = {some}\nwhile {thing.u}_count > {few}:\n    {thing.u}_count -= {pair}\n    print('{name}', {thing.u}_count)\n``` | \n```python\n{record.u}s = [{some}, {few}, {many}, {price}]\nresult = [x * {pair} for x in {record.u}s if x > {few2}]\nprint(sorted(result)[:{pair2}])\n```
         | \nAnswer for {audience}.
    """,
    "sql": r"""
        Write an SQL query that | I have a table `{record.u}s`. Write an SQL query that
        selects the {attribute} and {attribute2} of all {record.s} | counts the {record.s} per {attribute} | finds the {few} {record.s} with the highest {attribute}
        where {attribute3} is above {many}. | ordered by {attribute3}. | from the year {year}. | that belong to {city}.
        Explain it. | Then add an index. | 
    """,
    "data_structure": r"""
        In {language}, implement | Write {language} code for
        a queue of {record.s} | a stack of {record.s} | a cache for {few} {record.s} | a counter of {record.s} by {attribute} | a binary search over {record.s} sorted by {attribute}
        with add and remove. | and use it with {few2} values. | and print its {attribute2}. | without libraries.
        @code
    """,
}

DIALOGUE = {
    "order_back": r"""
        Please repeat my order: | Confirm my order in full sentences: | Write a friendly confirmation of this order:
        {few} {thing.s}, {pair} {thing2.s} and {object.a}, delivered to {city} on {day}. | {pair} tickets for the {event} in {city} on {day}, and {few} {thing.s}. | a table for {few} people on {day} at the {place}, with {food} and {food2}.
        My name is {name}. | The name is {name}, and {name2} will pay {many} dollars. | It is for {name}, who arrives by {vehicle}.
    """,
    "script": r"""
        Write a short conversation between {name} and {job.a} at the {place}. | Write a dialogue of {few} lines between {name} and {name2} in {city}. | Write what {name} and the {job} say to each other.
        {name} wants to buy {few2} {thing.s} for {price} dollars each. | {name} asks for the way to the {place2}. | {name} has lost {object.a} and asks for help. | {name} asks whether the {event} is on {day}.
        Begin every line with the name of the speaker. | Use very simple sentences. | End with "Thank you, {name}!"
    """,
    "form": r"""
        Answer in full sentences. | Answer each question with one sentence. | Use the words in brackets and answer each question.
        What is your name? ({name}) Where do you live? ({city}) What is your job? ({job}) | What would you like? ({few} {thing.s}) When? ({day}) How much may it cost? ({many} dollars) | Who is coming? ({name} and {name2}) Where to? (the {place} in {city}) How? (by {vehicle})
        How do you feel? ({mood}) | Do you like {food}? (yes) | What do you want to do? ({aim})
    """,
    "greeting_reply": r"""
        Hello, my name is {name} and I am {job.a} from {city}. | Good evening! I am {name}, the new {job} at the {place}. | Hi! This is {name} from the {place} in {city}.
        What is my name, and where do I come from? | Please greet me by my name and repeat what I do. | Write a short welcome message for me with my name in it.
        I like {food} and {food2}. | I have {few} {animal.s}. | I came by {vehicle} on {day}.
    """,
    "greeting": r"""
        Hi, I'm {name} from {city}. | Hello! My name is {name} and I work as a {job}. | Good morning, {name} here.
        I feel {mood} today because of {reason}. | I am looking for {quality} {category}. | I just heard about {topic}.
        What do you think? | Can you help me? | Any ideas for {day}?
        ---
        @follow
    """,
    "complaint": r"""
        My {object} {problem}. | I bought {object.a} in {month} and it {problem}.
        The shop in {city} does not answer. | I paid {many} dollars for it. | The {job} could not help.
        What should I do? | Write what I should say to the shop. | How do I ask for my money back?
        ---
        @follow
    """,
    "booking": r"""
        I would like to book a table for {few} people | Can I reserve a room for {pair} nights | I need {few} tickets for the {event}
        on {day} in {city}. | next to the {place} in {month}. | for {name} and {name2}.
        One of us does not eat {food}. | We arrive by {vehicle}. | We have {animal.a} with us. | It should be {quality}.
    """,
    "support": r"""
        I try to {aim}, but I am {mood}. | It is hard for me to {aim}. | My friend {name} wants to {aim} and is {mood}.
        I only have time on {day}. | I live in {city}. | Last time it failed because of {reason}.
        What would you suggest? | How can I start? | Tell me something encouraging.
        ---
        @follow
    """,
    "roleplay": r"""
        You are {job.a} at the {place} in {city}. | Pretend to be {job.a} who loves {animal.s}.
        A customer named {name} asks for {few} {thing.s}. | {name} asks you about {topic}. | A {mood} visitor has lost {object.a}.
        Write the conversation. | What do you answer? | Reply in {pair} sentences.
    """,
    "small_talk": r"""
        How was your {day}? | Do you like {food}? | Have you heard of the {event} in {city}?
        I had {food2} with {name} and felt {mood}. | My {animal} slept on the {object}. | I spent {minutes} minutes in the {vehicle} because of {reason}.
        Tell me a short story about it. | Ask me a question. | What should we talk about?
        ---
        @follow
    """,
    "directions": r"""
        How do I get from the {place} to the {place2} in {city}? | I am at the {place} in {city} and need a {place2}.
        I have {minutes} minutes. | I travel with {few} {container.s}. | I cannot take the {vehicle}.
        Please give simple steps. | What should I ask a {job}? | Is it far?
    """,
}

TEMPLATES: dict[str, list[Template]] = {
    "math": _parse(MATH),
    "explain": _parse(EXPLAIN),
    "rewrite": _parse(REWRITE),
    "list": _parse(LIST),
    "code": _parse(CODE),
    "dialogue": _parse(DIALOGUE),
}
