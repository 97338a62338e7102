from isthmus.demo.story import open_page as open_page
from isthmus.demo.story import searched as searched
from isthmus.demo.story import tell as tell
from isthmus.demo.story import tried as tried
