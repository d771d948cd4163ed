/* Part of _record.c: one line of JSON, read only as Python's json writes it.
 *
 * Taken are ASCII texts with a space behind each comma and colon or with none, no key twice in an
 * object, and every string and number in the one spelling that json.dumps gives it. Whatever else
 * a line holds is UNSURE, and the caller asks Python: nothing here says that a line is wrong.
 */

enum { MAX_DEPTH = 60, STYLE_OPEN = -1 };

typedef struct {
    char *bytes;
    Py_ssize_t size, room;
} Buffer;

/* Space for so many bytes more; NULL without memory. */
static char *
more_room(Buffer *buffer, Py_ssize_t size)
{
    if (buffer->room - buffer->size < size) {
        Py_ssize_t room = (buffer->size + size) * 2 + 1024;
        char *bytes = PyMem_Realloc(buffer->bytes, room);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        buffer->bytes = bytes;
        buffer->room = room;
    }
    return buffer->bytes + buffer->size;
}

static int
put(Buffer *buffer, const char *from, Py_ssize_t size)
{
    char *to = more_room(buffer, size);
    if (to == NULL)
        return FAILED;
    memcpy(to, from, size);
    buffer->size += size;
    return SURE;
}

static int
put_one(Buffer *buffer, char c)
{
    char *to = more_room(buffer, 1);
    if (to == NULL)
        return FAILED;
    *to = c;
    buffer->size++;
    return SURE;
}

/* A stretch of text. */
typedef struct {
    const char *from;
    Py_ssize_t size;
} Span;

static int
same_span(Span one, const char *from, Py_ssize_t size)
{
    return one.size == size && memcmp(one.from, from, size) == 0;
}

#define IS(span, literal) same_span(span, literal, sizeof(literal) - 1)

/* A member of an object: its key without quotes, and where its canonical text stands in a buffer. */
typedef struct {
    Span key;
    Py_ssize_t from, size;
} Member;

static int
by_key(const void *left, const void *right)
{
    const Member *one = left, *other = right;
    Py_ssize_t shared = one->key.size < other->key.size ? one->key.size : other->key.size;
    int order = memcmp(one->key.from, other->key.from, shared);
    return order != 0 ? order : (one->key.size > other->key.size) - (one->key.size < other->key.size);
}

typedef struct {
    const char *at, *end;
    int style; /* whether a space follows commas and colons, once one was seen */
    int escaped; /* the last string has an escape */
} Text;

/* 0 for what may stand in a string as it is. */
static unsigned char special[256];

static void
know_characters(void)
{
    for (int c = 0; c < 256; c++)
        special[c] = c < 0x20 || c > 0x7e || c == '"' || c == '\\';
}

static int
hex_digit(char c)
{
    return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The code unit of \uXXXX at `from`; -1 where it is not spelled so. */
static int
code_unit(const char *from, const char *end)
{
    int unit = 0;
    if (end - from < 6 || from[0] != '\\' || from[1] != 'u')
        return -1;
    for (int i = 2; i < 6; i++) {
        int digit = hex_digit(from[i]);
        if (digit < 0)
            return -1;
        unit = unit * 16 + digit;
    }
    return unit;
}

static const char SHORT[] = "\"\\nrtbf", MEANT[] = "\"\\\n\r\t\b\f";

/* The character that an escape stands for, and its length in *size; -1 for one json would not write. */
static Py_UCS4
escaped_character(const char *from, const char *end, int *size)
{
    if (end - from < 2)
        return (Py_UCS4)-1;
    const char *known = from[1] == '\0' ? NULL : strchr(SHORT, from[1]);
    if (known != NULL) {
        *size = 2;
        return (Py_UCS4)(unsigned char)MEANT[known - SHORT];
    }
    int unit = code_unit(from, end);
    *size = 6;
    if (unit < 0 || (unit >= 0x20 && unit <= 0x7e) || (unit < 0x20 && memchr(MEANT, unit, 7) != NULL))
        return (Py_UCS4)-1;
    if (unit < 0xd800 || unit > 0xdfff)
        return (Py_UCS4)unit;
    int low = code_unit(from + 6, end);
    if (unit > 0xdbff || low < 0xdc00 || low > 0xdfff)
        return (Py_UCS4)-1;
    *size = 12;
    return (Py_UCS4)(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00));
}

/* A string at its opening quote: what stands between its quotes. */
static int
read_string(Text *text, Span *found)
{
    const char *p = text->at, *end = text->end;
    if (p >= end || *p != '"')
        return UNSURE;
    found->from = ++p;
    text->escaped = 0;
    for (;;) {
        while (p < end && !special[(unsigned char)*p])
            p++;
        if (p >= end)
            return UNSURE;
        if (*p == '"')
            break;
        int size;
        if (*p != '\\' || escaped_character(p, end, &size) == (Py_UCS4)-1)
            return UNSURE;
        text->escaped = 1;
        p += size;
    }
    found->size = p - found->from;
    text->at = p + 1;
    return SURE;
}

/* A comma or colon and the space behind it, as everywhere on the line. */
static int
read_separator(Text *text, char mark)
{
    if (text->at >= text->end || *text->at != mark)
        return UNSURE;
    text->at++;
    int spaced = text->at < text->end && *text->at == ' ';
    if (text->style == STYLE_OPEN)
        text->style = spaced;
    text->at += spaced;
    return text->style == spaced ? SURE : UNSURE;
}

static int
read_word(Text *text, const char *word, Py_ssize_t size)
{
    if (text->end - text->at < size || memcmp(text->at, word, size) != 0)
        return UNSURE;
    text->at += size;
    return SURE;
}

/* What kind of value begins here; -1 for none. */
static int
kind_of(const Text *text)
{
    if (text->at >= text->end)
        return -1;
    switch (*text->at) {
    case '"':
        return IS_STRING;
    case '{':
        return IS_OBJECT;
    case '[':
        return IS_ARRAY;
    case 't':
        return IS_TRUE;
    case 'f':
        return IS_FALSE;
    case 'n':
        return IS_NULL;
    case '-':
        return IS_INT;
    default:
        return is_digit(*text->at) ? IS_INT : -1;
    }
}

static int
read_scalar(Text *text, int kind, Number *number, Span *string)
{
    switch (kind) {
    case IS_STRING:
        return read_string(text, string);
    case IS_INT:
        return read_number(&text->at, text->end, number);
    case IS_TRUE:
        return read_word(text, "true", 4);
    case IS_FALSE:
        return read_word(text, "false", 5);
    case IS_NULL:
        return read_word(text, "null", 4);
    default:
        return UNSURE;
    }
}

/* --- canonical text ------------------------------------------------------------------------------ */

/* Puts members in order: sorted, with commas, behind `start` of `out`, where their texts stand. */
static int
put_sorted(Buffer *out, Py_ssize_t start, Member *members, Py_ssize_t count)
{
    int in_order = 1;
    for (Py_ssize_t i = 1; i < count && in_order; i++)
        in_order = by_key(&members[i - 1], &members[i]) < 0;
    if (in_order)
        return SURE;
    qsort(members, count, sizeof *members, by_key);
    for (Py_ssize_t i = 1; i < count; i++)
        if (by_key(&members[i - 1], &members[i]) == 0)
            return UNSURE; /* a key that stands twice */
    Py_ssize_t size = out->size - start;
    char *texts = PyMem_Malloc(size), *to = out->bytes + start;
    if (texts == NULL) {
        PyErr_NoMemory();
        return FAILED;
    }
    memcpy(texts, to, size);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i)
            *to++ = ',';
        memcpy(to, texts + members[i].from - start, members[i].size);
        to += members[i].size;
    }
    PyMem_Free(texts);
    return SURE;
}

static int put_value(Text *text, Buffer *out, Buffer *members, int depth);

static int
put_object(Text *text, Buffer *out, Buffer *members, int depth)
{
    Py_ssize_t count = 0, base = members->size;
    text->at++;
    if (put_one(out, '{') < 0)
        return FAILED;
    Py_ssize_t start = out->size;
    int done = text->at < text->end && *text->at == '}';
    while (!done) {
        Member one;
        if (count && put_one(out, ',') < 0)
            return FAILED;
        one.from = out->size;
        if (read_string(text, &one.key) != SURE || text->escaped)
            return UNSURE;
        if (put(out, one.key.from - 1, one.key.size + 2) < 0 || put_one(out, ':') < 0)
            return FAILED;
        if (read_separator(text, ':') != SURE)
            return UNSURE;
        int sure = put_value(text, out, members, depth + 1);
        if (sure != SURE)
            return sure;
        one.size = out->size - one.from;
        if (put(members, (char *)&one, sizeof one) < 0)
            return FAILED;
        count++;
        done = text->at < text->end && *text->at == '}';
        if (!done && read_separator(text, ',') != SURE)
            return UNSURE;
    }
    text->at++;
    int sure = put_sorted(out, start, (Member *)(members->bytes + base), count);
    members->size = base;
    return sure == SURE ? put_one(out, '}') : sure;
}

static int
put_array(Text *text, Buffer *out, Buffer *members, int depth)
{
    text->at++;
    if (put_one(out, '[') < 0)
        return FAILED;
    int done = text->at < text->end && *text->at == ']';
    while (!done) {
        int sure = put_value(text, out, members, depth + 1);
        if (sure != SURE)
            return sure;
        done = text->at < text->end && *text->at == ']';
        if (!done && read_separator(text, ',') != SURE)
            return UNSURE;
        if (put_one(out, done ? ']' : ',') < 0)
            return FAILED;
    }
    if (out->bytes[out->size - 1] == '[' && put_one(out, ']') < 0)
        return FAILED;
    text->at++;
    return SURE;
}

/* Reads a value and puts its canonical text behind `out`. */
static int
put_value(Text *text, Buffer *out, Buffer *members, int depth)
{
    if (depth > MAX_DEPTH)
        return UNSURE;
    int kind = kind_of(text);
    if (kind == IS_OBJECT)
        return put_object(text, out, members, depth);
    if (kind == IS_ARRAY)
        return put_array(text, out, members, depth);
    Number number;
    Span string;
    const char *from = text->at;
    int sure = read_scalar(text, kind, &number, &string);
    return sure == SURE ? put(out, from, text->at - from) : sure;
}
