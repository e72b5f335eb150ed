"""The photographs in Debian's packages: cut-out objects by kind, and backgrounds."""

# The objects: folders and names, without `.png`, below the folder of tuxpaint's stamps. Drawings, mirrored twins and
# silhouettes are left out, and so are kinds with few photographs (insects, trees) or little in common (sea animals,
# vehicles): training on some hardly helps with others.
STAMPS = {
    'animal': {
        'animals/mammals': 'badger elephant echidna ferret giraffe hippopotamus pig pig_golden pig_golden2 '
                           'rabbit_little rhino_black wildboar',
        'animals/mammals/apes': 'chimp gorilla tamarin_emperor',
        'animals/mammals/aquatic': 'otter',
        'animals/mammals/bears': 'bear european-bear',
        'animals/mammals/bovines': 'bison bull cow cow_white gnu-baby gnu-baby-stand gnu-sitting gnu-stand goat '
                                   'indian_blackbuck mountaingoat ram sheep sheep_lamb yak zebu',
        'animals/mammals/camel': 'camel dromedary',
        'animals/mammals/cats': 'lion lion-2 tiger tiger_sumatran',
        'animals/mammals/deer': 'caribou deer doe wapiti',
        'animals/mammals/dogs': 'dingo dog fox',
        'animals/mammals/equines': 'donkey donkey_eating horse zebra',
        'animals/mammals/rodents': 'beaver capybara marmot mouse rabbit rabbit-2 rat squirrel',
        'animals/marsupials': 'kangaroo koala wombat',
        'animals/birds': 'adelaide-rosella albino_peahen blackbird chicken_profile crow crowned_crane cuckoo drake '
                         'duck gander guineafowl helmeted_guineafowl hen heron_greatblue heron_greatblue_flying lark '
                         'little-penguin magellanic_penguin magpie nandou ostrich owl peacock pelican penguin pigeon '
                         'pink_flamingo quetzal rainbow-lorikeet rooster seagull silver-gull tucan turkey vulture',
    },
    'flower': {
        'plants/flowers': 'adeenia anemone_red anthoorium appooppanthady bolsom chemparathi daffodil flower1 flower10 '
                          'flower2 flower3 flower4 flower5 flower6 flower7 flower8 flower9 iris marigold pigface '
                          'red-gazania rose whitestar-petunia yellow-flower',
    },
    'food': {
        'food/fruit': 'Apricot_whole Cherry_Stella Strawberry2 apple_fuji apple_granny_smith apple_green apple_red '
                      'apple_sierra_beauty apricot avocado banana cherimoya grapes kiwi lemon mandarine mango orange '
                      'orange_seville pear pineapple pomegranate raspberry sliced_lime sliced_orange strawberry',
        'food/nuts': 'almond pecan walnut walnut_shelled',
        'food/vegetables': 'broccoli carrot chilepepper corn eggplant garlic garlics lettuce mushroom onion '
                           'pattypan_squash pepper potato pumpkin_small redlettuce tomato yam yellowpepper',
        'plants/mushrooms': 'cep cep-1 cep-2',
    },
    'sign': {
        'town/roadsigns': 'arrow crossroads dead_end_sign give_way_sign hospital no_entry_sign no_uturn '
                          'railroad_crossing roundabout school_sign stop t-junction toilets traffic_cone xing_ped '
                          'xing_school yield',
    },
    'tool': {
        'household/tools': 'cementmixer hammer mallet_metal measuring_tape paintbrush_large plyers saw spade toolbox '
                           'wrench wrench_adjustable wrench_plumbers',
        'household/arttools': 'scissors_small_closed scissors_small_open',
        'household/dishes/utensils': 'nutcracker',
    },
    'instrument': {
        'hobbies/music/brass': 'trumpet',
        'hobbies/music/percussion': 'cymbal_crash drum_tomtom_floor drumkit',
        'hobbies/music/string': 'cello guitar2 guitar_classical guitar_electric guitar_electric_bass violin',
        'hobbies/music/wind': 'bassoon',
    },
    'planet': {
        'space/moon': 'moon_3qt moon_crescent moon_full',
        'space/planets': '1_mercury 2_venus 3_earth 4_mars 5_jupiter 6_saturn 7_uranus 8_neptune 9_pluto',
    },
}

# The backgrounds: names of files without suffix, or of the folder `NAME/contents/images` that has an image's sizes.
# Photographs that show something of a kind above, which would have no annotation, are left out.
BACKGROUNDS = (
    # plasma-workspace-wallpapers
    'BytheWater', 'ColdRipple', 'ColorfulCups', 'DarkestHour', 'EveningGlow', 'FallenLeaf', 'Grey', 'Kite',
    'OneStandsOut', 'Path', 'summer_1am',
    # mate-backgrounds
    'Aqua', 'Blinds', 'Dune', 'GreenMeadow', 'RainDrops', 'Storm', 'Wood',
    # lomiri-wallpapers-16.04
    'Bridge_by_Sander_Klootwijk', 'Dragonfly_by_Bolly', 'aitzgorri_by_Aitzol_Berasategi', 'greentock_by_Peter_Nerlich',
    'life_by_Aitzol_Berasategi', 'picosdeeuropa_by_Aitzol_Berasategi', 'sunset_by_Aitzol_Berasategi',
)
