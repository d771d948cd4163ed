/* Part of _record.c: the fields of a diary line, their order, and the canonical form of the line. */

enum { MOST_FIELDS = 64, HASH_SIZE = 64 };

typedef struct {
    Span key, string;
    Py_ssize_t from, size; /* canonical text: on the line, or of arrays and objects in `nested` */
    Number number;
    int kind, escaped;
} Field;

typedef struct {
    Field fields[MOST_FIELDS];
    unsigned char order[MOST_FIELDS]; /* by key, without prev and hash */
    int count, ordered;
    const Field *seq, *time, *event, *prev, *hash, *step, *severity, *rule, *lost_before;
    const Field *metrics_digest, *metrics_rows;
} Line;

/* A field that an event must have, and which texts it may be; none of them: anything. */
typedef struct {
    Span name, *allowed;
    int count;
} Needed;

typedef struct {
    Span kind;
    Needed *needed;
    int count, replayed;
    long long seen;
    unsigned char order[MOST_FIELDS]; /* of the last line of this type */
    int ordered;
} Form;

typedef struct {
    PyObject_HEAD
    PyObject *sha256, *names; /* the texts that the forms point into */
    PyObject *expected, *stops;
    Form *forms;
    Needed severities;
    int form_count;
    Buffer body, nested, members;
    Known known;
    char chained[HASH_SIZE + 1], digest[HASH_SIZE + 1];
    long long count, last_step, matched, row_step, rows, last_start;
    double last_time;
    char with_rows;
} Walk;

static const Field **
place_of(Line *line, Span key)
{
    switch (key.size) {
    case 3:
        return IS(key, "seq") ? &line->seq : NULL;
    case 4:
        return IS(key, "time")   ? &line->time
               : IS(key, "step") ? &line->step
               : IS(key, "prev") ? &line->prev
               : IS(key, "hash") ? &line->hash
               : IS(key, "rule") ? &line->rule
                                 : NULL;
    case 5:
        return IS(key, "event") ? &line->event : NULL;
    case 8:
        return IS(key, "severity") ? &line->severity : NULL;
    case 11:
        return IS(key, "lost_before") ? &line->lost_before : NULL;
    case 12:
        return IS(key, "metrics_rows") ? &line->metrics_rows : NULL;
    case 14:
        return IS(key, "metrics_digest") ? &line->metrics_digest : NULL;
    default:
        return NULL;
    }
}

/* The members of the object that is the line; arrays and objects go into `nested`. */
static int
read_fields(Walk *walk, const char *from, const char *to, Line *line)
{
    Text text = {from, to, STYLE_OPEN, 0};
    memset(&line->seq, 0, sizeof *line - offsetof(Line, seq));
    line->count = 0;
    walk->nested.size = walk->members.size = 0;
    if (from == to || *text.at++ != '{' || text.at >= to || *text.at == '}')
        return UNSURE;
    for (int done = 0; !done;) {
        if (line->count == MOST_FIELDS)
            return UNSURE;
        Field *field = &line->fields[line->count++];
        if (read_string(&text, &field->key) != SURE || text.escaped
            || read_separator(&text, ':') != SURE)
            return UNSURE;
        field->kind = kind_of(&text);
        int sure;
        if (field->kind == IS_OBJECT || field->kind == IS_ARRAY) {
            field->from = walk->nested.size;
            sure = put_value(&text, &walk->nested, &walk->members, 1);
            field->size = walk->nested.size - field->from;
        }
        else {
            const char *start = text.at;
            sure = read_scalar(&text, field->kind, &field->number, &field->string);
            if (field->kind == IS_INT)
                field->kind = field->number.type;
            field->escaped = text.escaped;
            field->from = start - from;
            field->size = text.at - start;
        }
        if (sure != SURE)
            return sure;
        const Field **place = place_of(line, field->key);
        if (place != NULL) {
            if (*place != NULL)
                return UNSURE;
            *place = field;
        }
        done = text.at < to && *text.at == '}';
        if (!done && read_separator(&text, ',') != SURE)
            return UNSURE;
    }
    return text.at + 1 == to ? SURE : UNSURE;
}

static int
key_order(const Field *one, const Field *other)
{
    Member left = {one->key, 0, 0}, right = {other->key, 0, 0};
    return by_key(&left, &right);
}

/* Fills in `order`; `form` remembers it, as lines of a type have their fields in one order mostly. */
static int
order_fields(Line *line, Form *form)
{
    line->ordered = line->count - (line->prev != NULL) - (line->hash != NULL);
    if (form != NULL && form->ordered == line->ordered) {
        int fits = 1;
        for (int i = 0; i < line->ordered && fits; i++) {
            const Field *field = &line->fields[form->order[i]];
            fits = form->order[i] < line->count && field != line->prev && field != line->hash
                   && (i == 0 || key_order(&line->fields[form->order[i - 1]], field) < 0);
        }
        if (fits) {
            memcpy(line->order, form->order, line->ordered);
            return SURE;
        }
    }
    int count = 0;
    for (int i = 0; i < line->count; i++) {
        const Field *field = &line->fields[i];
        if (field == line->prev || field == line->hash)
            continue;
        int at = count++;
        for (; at > 0; at--) {
            int order = key_order(&line->fields[line->order[at - 1]], field);
            if (order == 0)
                return UNSURE;
            if (order < 0)
                break;
            line->order[at] = line->order[at - 1];
        }
        line->order[at] = (unsigned char)i;
    }
    if (form != NULL) {
        form->ordered = line->ordered;
        memcpy(form->order, line->order, line->ordered);
    }
    return SURE;
}

/* The canonical form of the line without prev and hash, behind what `body` has. */
static int
put_body(Walk *walk, const char *from, const Line *line)
{
    Buffer *body = &walk->body;
    Py_ssize_t size = 2;
    for (int i = 0; i < line->ordered; i++) {
        const Field *field = &line->fields[line->order[i]];
        size += field->key.size + field->size + 4;
    }
    char *to = more_room(body, size);
    if (to == NULL)
        return FAILED;
    *to++ = '{';
    for (int i = 0; i < line->ordered; i++) {
        const Field *field = &line->fields[line->order[i]];
        int nested = field->kind == IS_OBJECT || field->kind == IS_ARRAY;
        if (i)
            *to++ = ',';
        memcpy(to, field->key.from - 1, field->key.size + 2);
        to += field->key.size + 2;
        *to++ = ':';
        memcpy(to, (nested ? walk->nested.bytes : from) + field->from, field->size);
        to += field->size;
    }
    *to++ = '}';
    body->size = to - body->bytes;
    return SURE;
}
