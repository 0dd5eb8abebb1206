"""Words for the procedural prompts. Singular nouns have regular plurals (an added ``s``)."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(",") if word.strip())


LEXICON: dict[str, tuple[str, ...]] = {
    "name": _words("""
        Amara, Ben, Chloe, Diego, Elif, Farah, Gabriel, Hana, Ivan, Jasmine, Kofi, Lena, Mateo, Nadia, Oscar,
        Priya, Quentin, Rosa, Samir, Tara, Umar, Vera, Wei, Ximena, Yusuf, Zoe, Aiko, Bruno, Carmen, Dmitri,
        Esther, Felix, Greta, Hugo, Ingrid, Jamal, Keiko, Liam, Maya, Noah, Olga, Pablo, Rania, Stefan, Tomas,
        Uma, Victor, Wanda, Yara, Zain, Alice, Boris, Clara, Daniel, Emma, Frank, Gina, Henry, Isla, Jorge,
        Karen, Lucas, Mina, Nico, Olivia, Peter, Rachel, Sofia, Theo, Ulla, Vikram, Willow, Xavier, Yvonne,
        Zack, Anita, Bashir, Cyrus, Dalia"""),
    "city": _words("""
        Lisbon, Nairobi, Osaka, Toronto, Prague, Lima, Cairo, Dublin, Hanoi, Seville, Bergen, Quito, Jaipur,
        Athens, Denver, Lyon, Tunis, Krakow, Cape Town, Busan, Bologna, Antwerp, Austin, Porto, Tbilisi,
        Valencia, Izmir, Zagreb, Perth, Oslo, Riga, Turin, Bergamo, Montreal, Accra, Medellin, Kyoto, Ghent,
        Utrecht, Glasgow"""),
    "job": _words("""
        teacher, nurse, baker, engineer, gardener, librarian, carpenter, electrician, farmer, pharmacist,
        plumber, journalist, photographer, mechanic, tailor, chef, pilot, painter, translator, accountant,
        florist, barber, firefighter, designer, musician, coach, cashier, receptionist, biologist, shopkeeper,
        postman, waiter, beekeeper, potter, surveyor, tutor, archivist, optician, welder, driver"""),
    "thing": _words("""
        apple, orange, pencil, notebook, marble, sticker, button, balloon, candle, cookie, muffin, sandwich,
        lemon, carrot, tomato plant, rose, tulip, postcard, stamp, coin, badge, puzzle, toy car, kite, football,
        ribbon, bracelet, mug, plate, spoon, towel, pillow, blanket, lamp, battery, cable, screw, nail, brick,
        tile, bottle, jar, basket, box of tea, bag of rice, ticket, poster, magazine, comic book, seashell,
        pebble, acorn, feather, pumpkin, melon, pear, plum, onion, cupcake, pie, bagel, chair, bench, flower
        pot, paint brush, crayon, folder, envelope, calendar, clock, watch strap, sock, scarf, hat, glove,
        lantern, bell, flute, drum, bookmark, magnet"""),
    "place": _words("""
        market, library, school, bakery, museum, bookshop, garden centre, bus station, sports club, hospital,
        workshop, community hall, theatre, train station, post office, supermarket, harbour, farm, hotel, cafe,
        pharmacy, gym, swimming pool, art gallery, city park, airport, town hall, laundry, pet shop, hardware
        store"""),
    "container": _words("box, bag, rack, basket, crate, drawer, tray, packet, jar, bucket, carton, sack, bin, case"),
    "day": _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "month": _words("""
        January, February, March, April, May, June, July, August, September, October, November, December"""),
    "vehicle": _words("car, bus, train, van, bicycle, scooter, truck, ferry, tram, motorbike, taxi, minibus"),
    "animal": _words("""
        hen, goat, sheep dog, rabbit, duck, horse, cow, pony, llama, turkey, cat, parrot, hamster, turtle,
        donkey, pigeon, alpaca, hedgehog, ferret, quail, swan, beaver, owl, penguin, otter, squirrel, lizard,
        frog"""),
    "topic": _words("""
        photosynthesis, gravity, inflation, the water cycle, vaccination, recycling, compound interest,
        evaporation, electric current, plate tectonics, the immune system, democracy, supply and demand,
        magnetism, fermentation, digestion, the food chain, the internet, encryption, machine learning, a search
        engine, a bank loan, insurance, budgeting, composting, natural selection, the solar system, a solar
        eclipse, the seasons, ocean tides, earthquakes, volcanoes, rainbows, sound waves, friction, momentum,
        the printing press, the steam engine, a refrigerator, a microwave oven, a combustion engine, a wind
        turbine, solar panels, a heat pump, a camera, a telescope, a thermometer, a battery, a bicycle gear, a
        pulley, a lever, a parachute, a submarine, a helicopter, public transport, taxes, a stock market, a
        trade union, a constitution, an election, human rights, migration, urban planning, biodiversity, coral
        reefs, deforestation, pollination, hibernation, bird migration, metamorphosis, DNA, cell division, blood
        circulation, breathing, sleep, memory, stress, habits, empathy, teamwork, leadership, time management,
        note taking, critical thinking, negotiation, first aid, allergies, vitamins, hydration, a balanced diet,
        muscle growth, antibiotics, a fever, bread baking, cheese making, coffee roasting, tea growing, soap
        making, paper making, glass blowing, pottery, weaving, beekeeping, crop rotation, irrigation, greenhouse
        farming, fishing quotas, a lighthouse, a compass, map reading, GPS navigation, weather forecasts, a
        barometer, cloud formation, lightning, glaciers, deserts, rainforests, tundra, wetlands, river deltas,
        caves, fossils, dinosaurs, the ice age, the Roman Empire, the Silk Road, the Renaissance, the Industrial
        Revolution, the space race, satellites, rockets, black holes, comets, meteor showers, the Moon's phases,
        time zones, leap years, the metric system, prime numbers, fractions, percentages, probability, averages,
        geometry, algebra, statistics, graphs, a database, an algorithm, recursion, a spreadsheet, version
        control, open source software, a firewall, a password manager, spam filters, cookies on websites, cloud
        storage, Bluetooth, radio, fibre optics, a touchscreen, 3D printing, robots, self-driving cars, electric
        cars, hydrogen fuel, nuclear power, hydroelectric dams, carbon dioxide, the ozone layer, acid rain,
        plastic waste, food labels, fair trade, advertising, branding, customer service, a business plan,
        crowdfunding, a mortgage, credit scores, pensions"""),
    "audience": _words("""
        a ten-year-old child, a high school student, a new employee, my grandmother, a group of beginners, a
        curious neighbour, a first-year student, someone who has never heard of it, a busy manager, an exchange
        student, a class of teenagers, a museum visitor, a retired teacher, a young athlete, a shop owner, a
        farmer, a worried parent, a science club, a book club, a language learner"""),
    "field": _words("""
        school projects, cooking at home, small businesses, city life, farming, health, family budgets, sports
        training, travel planning, office work, gardening, music lessons, local politics, house repairs, online
        shopping, public health, engineering, art classes, community work, event planning"""),
    "quality": _words("""
        cheap, healthy, simple, creative, quiet, traditional, modern, popular, unusual, useful, relaxing,
        colourful, practical, famous, safe, beginner-friendly, eco-friendly, seasonal, portable, low-cost,
        well-known, fun"""),
    "category": _words("""
        breakfast dishes, vegetables, fruits, indoor plants, board games, card games, outdoor games, hobbies,
        books for children, musical instruments, dance styles, winter sports, water sports, exercises,
        stretching routines, desserts, soups, salads, sandwiches, spices, drinks without alcohol, dog breeds,
        farm animals, sea animals, birds, insects, trees, garden flowers, kitchen tools, hand tools, school
        supplies, office supplies, gifts for a friend, gifts for a teacher, birthday party themes, team
        activities, icebreaker questions, interview questions, study habits, ways to save money, ways to save
        water, ways to save energy, ways to reduce waste, cleaning tips, packing tips, camping items, travel
        destinations, museums, festivals, national holidays, languages, inventions, scientists, explorers,
        painters, composers, film genres, poem forms, story ideas, blog topics, podcast topics, science
        experiments, craft projects, sewing projects, woodworking projects, coding projects, phone apps, safety
        rules, classroom rules, house rules, table manners, morning habits, evening habits, relaxation methods,
        memory tricks, note-taking methods, public speaking tips, email writing tips, ways to make friends,
        volunteer jobs, summer jobs, part-time jobs, marketing ideas, shop names, team names, pet names, street
        foods, pasta shapes, bread types, cheeses, herbs, mountain ranges, rivers, deserts, islands, capital
        cities"""),
    "mood": _words(
        "happy, calm, tired, excited, nervous, proud, curious, surprised, worried, hopeful, bored, grateful"
    ),
    "reason": _words("""
        the heavy rain, a power cut, a strike, a public holiday, a broken heater, a lost key, a late delivery, a
        flat tyre, a traffic jam, a water leak, a staff meeting, a school trip, a snow storm, a software update,
        a fire drill, a wrong address, a shortage of staff, a missing invoice, a local festival, a road closure"""),
    "event": _words("""
        spring concert, charity run, science fair, cooking class, book sale, staff meeting, art exhibition,
        chess tournament, school play, job fair, garden party, film night, town festival, safety training,
        farewell dinner, swimming lesson, yoga course, photo contest, bake sale, parents' evening"""),
    "object": _words("""
        laptop, washing machine, bicycle, phone, coffee machine, printer, backpack, tent, vacuum cleaner,
        heater, camera, guitar, desk, sofa, mirror, lawn mower, sewing machine, headset, keyboard, router,
        dishwasher, toaster"""),
    "problem": _words("""
        makes a loud noise, will not switch on, stopped working after two weeks, arrived with a scratch, is too
        small, is missing a part, gets very hot, has the wrong colour, shows an error message, leaks water,
        smells of smoke, loses its charge quickly, does not fit through the door, is slower than promised, broke
        on the first day"""),
    "aim": _words("""
        learn to cook, get fit, save money, read more books, sleep better, learn Spanish, grow vegetables, start
        a blog, write a short story, play the piano, run five kilometres, use less plastic, tidy my flat, find a
        new job, make new friends, learn to swim, take better photos, spend less time on my phone, plan a
        wedding, adopt a dog, learn basic Python, organise a picnic, prepare for an exam, paint my bedroom,
        repair my bicycle, bake bread"""),
    "food": _words("""
        tomatoes, rice, lentils, potatoes, chicken, eggs, spinach, chickpeas, pasta, mushrooms, carrots, onions,
        tofu, salmon, cheese, beans, peppers, cabbage, noodles, yoghurt, bread, pumpkin, corn, broccoli, apples,
        bananas"""),
    "language": _words("Python, Python, Python, Python, JavaScript, Java, C, Bash, SQL"),
    "container_type": _words("list, tuple, set, dictionary, string, sorted list, nested list, queue"),
    "record": _words("""
        student, book, order, city, employee, song, movie, product, flight, recipe, player, sensor reading,
        invoice, message, photo, ticket, country, event, task, payment"""),
    "attribute": _words("""
        name, price, date, length, score, weight, rating, age, year, distance, height, size, duration,
        temperature, quantity, category, colour, author, speed, balance"""),
}
