/* A training loop in C over `rlhf session`: sample, score, step. Short responses score higher.
 *
 *     cc -o client client.c && ./client PATH/TO/rlhf MODEL_FOLDER
 *
 * Arrays are lists in the lines ("arrays": "lists"), so that no frames are read; the rows of responses go back as they came.
 * docs/internals/session.md has the protocol. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static FILE *requests, *replies;
static char *line = NULL;
static size_t room = 0;

/* Sends a request, and returns the line of its reply; an error ends the program with its message. */
static const char *ask(const char *method, const char *params) {
    static int id = 0;
    fprintf(requests, "{\"id\": %d, \"method\": \"%s\", \"params\": %s}\n", ++id, method, params);
    fflush(requests);
    if (getline(&line, &room, replies) < 0) {
        fprintf(stderr, "%s: the program has ended\n", method);
        exit(1);
    }
    if (strstr(line, "\"error\":")) {
        fprintf(stderr, "%s: %s", method, line);
        exit(1);
    }
    return line;
}

/* The nested list behind "name": in a reply, as a text of its own. */
static char *list_of(const char *reply, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *start = strchr(strstr(reply, key), '['), *end = start;
    int depth = 0;
    do {
        depth += (*end == '[') - (*end == ']');
        end++;
    } while (depth > 0);
    return strndup(start, (size_t)(end - start));
}

/* A score for each row of a list: minus its number of tokens. */
static char *scores_of(const char *rows) {
    char *scores = malloc(strlen(rows) + 16), *out = scores;
    int depth = 0, tokens = 0;
    *out++ = '[';
    for (; *rows; rows++) {
        depth += (*rows == '[') - (*rows == ']');
        if (depth == 2 && *rows == '[')
            tokens = 1;
        else if (depth == 2 && *rows == ',')
            tokens++;
        else if (depth == 1 && *rows == ']')
            out += sprintf(out, "-%d", tokens);
        else if (depth == 1 && *rows == ',')
            *out++ = ',';
    }
    strcpy(out, "]");
    return scores;
}

int main(int count, char **words) {
    int to[2], from[2];
    if (count != 3 || pipe(to) || pipe(from))
        return fprintf(stderr, "usage: client PATH/TO/rlhf MODEL_FOLDER\n"), 1;
    if (fork() == 0) {
        dup2(to[0], 0), dup2(from[1], 1);
        close(to[0]), close(to[1]), close(from[0]), close(from[1]);
        execl(words[1], "rlhf", "session", (char *)NULL);
        _exit(127);
    }
    close(to[0]), close(from[1]);
    requests = fdopen(to[1], "w"), replies = fdopen(from[0], "r");

    char *params = malloc(1 << 20);
    ask("hello", "{\"protocol\": 1, \"arrays\": \"lists\"}");
    snprintf(params, 1 << 20, "{\"loop\": \"step\", \"model\": \"%s\", \"config\": {\"batch_size\": 4, \"mini_batch_size\": 2}}", words[2]);
    ask("open", params);
    const char *queries = "[[5, 6, 7], [8, 9], [10], [11, 12]]";
    for (int step = 1; step <= 3; step++) {
        snprintf(params, 1 << 20, "{\"queries\": %s, \"max_new_tokens\": 8, \"top_k\": 0}", queries);
        char *responses = list_of(ask("generate", params), "responses");
        char *scores = scores_of(responses);
        snprintf(params, 1 << 20, "{\"queries\": %s, \"responses\": %s, \"scores\": %s}", queries, responses, scores);
        const char *reply = ask("step", params);
        printf("step %d: mean score %.3f, KL %.4f\n", step, atof(strstr(reply, "\"ppo/mean_scores\":") + 18),
               atof(strstr(reply, "\"objective/kl\":") + 15));
        free(responses), free(scores);
    }
    ask("stop", "{}");
    wait(NULL);
    return 0;
}
