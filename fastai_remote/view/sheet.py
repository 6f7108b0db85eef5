"""Samples on one picture, for a shell

Docs: page `view/sheet`"""
from PIL import Image, ImageDraw

from .pictures import cut_text, drawn_text, font_of

_GAP,_LINE = 8,15 # Pixels between samples; of a line of text

def sheet(
    samples:list, # Of `Sample`
    columns:int=None # Default: about as many as rows
)->Image.Image: # Of mode RGB
    "A picture of all samples, each with its number and its labels below"
    size,n = samples[0].size,len(samples)
    columns = min(columns or max(4, round(n**.5)), n)
    width,height = size+_GAP,size+_GAP+2*_LINE
    image = Image.new('RGB', (columns*width+_GAP, -(-n//columns)*height+_GAP), 'white')
    draw,font = ImageDraw.Draw(image),font_of(11)
    for k,sample in enumerate(samples):
        x,y = _GAP+k%columns*width,_GAP+k//columns*height
        shown = sample.image if sample.image is not None else drawn_text(sample, size)
        if max(shown.size)>size: shown.thumbnail((size,size))   # several images side by side
        image.paste(shown, (x+(size-shown.width)//2, y+(size-shown.height)//2))
        for row,text in enumerate((_fitting(sample.title.replace('\n', ' '), font, size), f'#{sample.number}')):
            draw.text((x+size//2, y+size+2+row*_LINE), text, 'black' if row==0 else (120,120,120), font, anchor='ma')
    return image

def _fitting(text, font, width):
    "The beginning of a text that is at most so many pixels wide"
    text = cut_text(text, 80)
    while text and font.getlength(text)>width: text = text[:-2]+'…' if len(text)>2 else ''
    return text
