/* Which thread of _weights.c takes which chunk, and when: a job is all items of one call.
 *
 * Nothing here touches the interpreter, which is free meanwhile.
 */

typedef struct {
    Item *items;
    Py_ssize_t size, next; /* next: the first with chunks that nobody has summed */
    Py_ssize_t *ready, readies; /* items whose chunks wait for their bins */
    int histogram, running;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Job;

/* When every chunk was summed; answers whether the chunks are to be read again, for their bins. */
static int
finish_sums(Item *item, int histogram)
{
    if (item->code == BYTE) {
        finish_bytes(item, histogram);
        return 0;
    }
    for (int64_t chunk = 0; chunk < item->chunks; chunk++)
        merge(&item->sums, &item->parts[chunk]);
    if (!histogram || item->sums.count == 0)
        return 0;
    if (item->sums.lo == item->sums.hi) {
        item->counts[0] = item->sums.count;
        return 0;
    }
    plan_edges(item);
    return 1;
}

/* An item of one chunk, both times: it is still in the cache. */
static void
reduce_small(Item *item, int histogram)
{
    if (item->code == BYTE)
        count_bytes(item, 0, item->bytes);
    else
        sum_chunk(item, 0, &item->parts[0]);
    if (finish_sums(item, histogram)) {
        bin_chunk(item, 0, item->counts);
        forget_odd(item);
    }
}

/* The next three are called with the lock held, and hold it when they return. */

static void
bin_next(Job *job)
{
    Item *item = &job->items[job->ready[job->readies - 1]];
    int64_t chunk = item->chunks - ++item->binned, counts[BINS] = {0};
    if (item->binned == item->chunks)
        job->readies--;
    pthread_mutex_unlock(&job->lock);
    bin_chunk(item, chunk, counts);
    pthread_mutex_lock(&job->lock);
    for (int k = 0; k < BINS; k++)
        item->counts[k] += counts[k];
    if (--item->left == 0)
        forget_odd(item);
}

static void
reduce_next_small(Job *job)
{
    Py_ssize_t first = job->next;
    int64_t elements = 0;
    do {
        elements += job->items[job->next++].size;
    } while (job->next < job->size && job->items[job->next].chunks == 1 && elements < CHUNK / 4);
    Py_ssize_t end = job->next;
    pthread_mutex_unlock(&job->lock);
    for (; first < end; first++)
        reduce_small(&job->items[first], job->histogram);
    pthread_mutex_lock(&job->lock);
}

static void
sum_next(Job *job)
{
    Item *item = &job->items[job->next];
    int64_t chunk = item->summed++, seen[256] = {0};
    if (item->summed == item->chunks)
        job->next++;
    job->running++;
    pthread_mutex_unlock(&job->lock);
    if (item->code == BYTE)
        count_bytes(item, chunk, seen);
    else
        sum_chunk(item, chunk, &item->parts[chunk]);
    pthread_mutex_lock(&job->lock);
    if (item->code == BYTE)
        for (int byte = 0; byte < 256; byte++)
            item->bytes[byte] += seen[byte];
    job->running--;
    if (--item->left == 0 && finish_sums(item, job->histogram)) {
        item->left = item->chunks;
        job->ready[job->readies++] = item - job->items;
        pthread_cond_broadcast(&job->changed);
    } else if (job->running == 0) {
        pthread_cond_broadcast(&job->changed);
    }
}

static void *
work(void *argument)
{
    Job *job = argument;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV); /* torch.set_flush_denormal() is not for us */
    pthread_mutex_lock(&job->lock);
    for (;;) {
        if (job->readies > 0)
            bin_next(job);
        else if (job->next < job->size && job->items[job->next].chunks == 1)
            reduce_next_small(job);
        else if (job->next < job->size)
            sum_next(job);
        else if (job->running > 0)
            pthread_cond_wait(&job->changed, &job->lock);
        else
            break;
    }
    pthread_mutex_unlock(&job->lock);
    fesetenv(&before);
    return NULL;
}

static void
run(Job *job, int threads)
{
    pthread_t started[MAX_THREADS];
    int count = 0;
    sigset_t all, before;
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->changed, NULL);
    if (threads > 1) {
        /* Signals are for the program's threads. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (count < threads - 1 && count < MAX_THREADS
               && pthread_create(&started[count], NULL, work, job) == 0)
            count++; /* with fewer threads it takes longer, no more */
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work(job);
    while (count > 0)
        pthread_join(started[--count], NULL);
    pthread_cond_destroy(&job->changed);
    pthread_mutex_destroy(&job->lock);
}
